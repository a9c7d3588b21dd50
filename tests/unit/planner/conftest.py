"""Utilisations from fewer simulated requests, where the simulation is not the subject."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from relaygr_stream.ops.planner import utilisation
from tests.unit.planner import worlds

#: An eighth of them: each utilisation takes 0.05 s of a processor, not 0.4, and a property asks for many.
FEWER = utilisation.REQUESTS // 8


@pytest.fixture(scope="module", autouse=True)
def _fewer_requests(request: pytest.FixtureRequest) -> Iterator[None]:
    """For each file but that of the simulation."""
    if request.module.__name__.endswith("test_utilisation"):
        yield
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(utilisation, "REQUESTS", FEWER)
        _forget()
        yield
        _forget()


def _forget() -> None:
    """What was found with another number."""
    utilisation._utilisation.cache_clear()
    worlds.rate_for.cache_clear()
