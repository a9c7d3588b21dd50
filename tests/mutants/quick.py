"""A plugin of pytest for runs on a mutant: Hypothesis finds the same examples each time, and shrinks none.

How small the example can be that a mutant fails on is nobody's question, and takes minutes.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings


def pytest_configure(config: pytest.Config) -> None:
    """Over the profile that tests/conftest.py has loaded by now."""
    settings.register_profile("mutants", settings(), derandomize=True, phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutants")
