"""Requests without scores count in the figures by which the benches of delegation and histories judge."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import history
import pytest

from relaygr_stream.errors import Overloaded
from relaygr_stream.settings.schema import Client, History, Settings
from relaygr_stream.wire.behaviours import Behaviours

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from relaygr_stream.client import RelayClient


def test_a_refused_or_failed_request_takes_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLEEPER_DILATION", "1")  # the bench would set it for good
    from delegation import Run
    from forwarding import TIMEOUT_S

    run = Run(sent=10, refused=2, failed=1, latencies=[10.0] * 7)
    assert (run.p(0.5), run.p(0.99)) == (10.0, TIMEOUT_S * 1e3)


class HalfAnswers:
    """A client whose rankings by reference are refused."""

    async def worker_serves(self, timeout: float) -> None: ...

    @asynccontextmanager
    async def request(self, user: str, behaviours: object, **given: object) -> AsyncIterator[Any]:
        async def rank(candidates: object) -> SimpleNamespace:
            if not isinstance(behaviours, Behaviours):
                raise Overloaded("no")
            return SimpleNamespace(outcome="hbm")

        yield SimpleNamespace(rank=rank)


async def test_a_ranking_without_scores_is_no_hit_and_takes_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"USERS": 2, "WARM": 0, "RETRIEVAL_S": 0.0}.items():
        monkeypatch.setattr(history, name, value)
    settings = Settings(history=History(store=f"sqlite:{tmp_path / 'store'}"), client=Client(timeout_ms=2_000))
    modes = {"carrying all": history.Mode(), "by reference": history.Mode()}
    await history.play(cast("RelayClient", HalfAnswers()), settings, 4, modes)
    carried, referred = modes.values()
    assert (len(carried.ms), carried.hits, len(referred.ms), referred.hits) == (2, 1.0, 2, 0.0)
    assert referred.at(50) == 2_000 > carried.at(50)
