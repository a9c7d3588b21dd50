"""Before any of these tests imports triton: say whether it is to interpret."""

from tests.unit.models.kernels.interpreter import prepare

prepare()
