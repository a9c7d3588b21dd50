import pytest

# The asserts of helpers tell what they compared, as those of tests do.
pytest.register_assert_rewrite("tests.bus", "tests.e2e", "tests.faults", "tests.unit")
