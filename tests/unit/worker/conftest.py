"""Settings for the tests of the worker's service."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _time_to_announce(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine saying that the worker stops may take longer than the second after which it is left unsaid."""
    monkeypatch.setattr("relaygr_stream.worker.status.ANNOUNCE_S", 20.0)
