"""What torch imports only as an optimizer is made: once before the tests' processes are forked, not in each of them."""

from __future__ import annotations

import importlib


def pytest_collection_finish() -> None:
    importlib.import_module("torch._dynamo")  # with triton, whose interpreter the kernels' tests ask for before
