"""Parts of a worker that end inside aiokafka are made anew: rankings are answered, and readiness says what ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from relaygr_stream.bus.renewed import background_tasks
from relaygr_stream.errors import DeviceError
from relaygr_stream.settings.schema import Kafka
from tests.bus import insides
from tests.unit.worker.services import Peer, owned, worker_on, worker_settings
from tests.waiting import WITHIN_S, until


def unexpected(*_: object, **__: object) -> Any:
    raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is gone")


async def test_a_worker_whose_reader_ended_answers_on(embedded_settings: Kafka) -> None:
    settings = worker_settings(embedded_settings, name="w-reader")  # a name that no other test uses
    async with Peer(embedded_settings) as peer, worker_on(settings) as w:
        assert (await peer.reply(await peer.rank("r0", "u", 30))).status == "ok"
        reader = insides.reader("w-reader")
        insides.fail_fetcher(reader)
        for number in range(1, 4):
            correlation = await peer.rank(f"r{number}", "u", 30)
            assert (await peer.reply(correlation)).status == "ok"
        await until(lambda: w.ready, "ready again")
        assert background_tasks(reader)["fetcher"].done()
        assert owned(w) == peer.topics.lanes
        assert w.context.registry.get_sample_value("relaygr_parts_made_anew_total", {"part": "the lanes' reader"})


async def test_a_worker_whose_producer_ended_answers_on(embedded_settings: Kafka) -> None:
    settings = worker_settings(embedded_settings, name="w-producer")  # a name that no other test uses
    async with Peer(embedded_settings) as peer, worker_on(settings) as w:
        assert (await peer.reply(await peer.rank("r0", "u", 30))).status == "ok"
        for producer in (insides.producer("w-producer-scores"), insides.producer("w-producer-others")):
            producer.client.send = unexpected
        for number in range(1, 4):
            correlation = await peer.rank(f"r{number}", "u", 30)
            assert (await peer.reply(correlation)).status == "ok"
        peer.statuses.clear()
        await until(lambda: peer.statuses, "a status")
        await until(lambda: w.ready, "ready again")


async def test_a_device_that_dies_while_the_worker_drains_leaves_no_request_without_an_answer(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drained for its whole time, and what it had read got no answer."""
    settings = worker_settings(embedded_settings, drain_ms=60_000)
    async with Peer(embedded_settings) as peer, worker_on(settings) as w:
        w.model.hang = True
        correlations = [await peer.rank(f"r{number}", f"u{number}", 60) for number in range(3)]
        await until(lambda: w.total("rankings_read") == 3, "read")
        w.context.stop.set()
        # Its status does not tell: a device that hangs answers no question, so nothing is stated.
        await until(lambda: not w.worker.consumer.healthy, "drains")

        def die(now: float, *, rankings_only: bool) -> bool:
            raise DeviceError("a defect")

        monkeypatch.setattr(w.runtime.scheduler, "step", die)
        w.model.hang = False
        with pytest.raises(DeviceError, match="a defect"):
            await asyncio.wait_for(w.task, WITHIN_S)
        assert {(await peer.reply(each)).status for each in correlations} <= {"ok", "failed"}
