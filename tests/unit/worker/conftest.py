"""A broker of their own for the tests of the worker's service.

The embedded broker slows as its log grows, and by the time these run, others have sent it tens of thousands of
messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from relaygr_stream.ops.brokers.local import LocalBroker, local_broker


@pytest.fixture(scope="module")
def embedded_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """An embedded broker that nobody has used."""
    with asyncio.Runner() as runner:
        context = local_broker("embedded", folder=tmp_path_factory.mktemp("broker"))
        yield runner.run(context.__aenter__())
        runner.run(context.__aexit__(None, None, None))


@pytest.fixture(autouse=True)
def _time_to_announce(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine saying that the worker stops may take longer than the second after which it is left unsaid."""
    monkeypatch.setattr("relaygr_stream.worker.status.ANNOUNCE_S", 20.0)
