"""Parts of a worker that end inside aiokafka are made anew: rankings are answered, and readiness says what ended."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from relaygr_stream.errors import DeviceError
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.worker.scheduler import RelayCore
from tests.unit.worker.services import Peer, owned, worker_on, worker_settings
from tests.waiting import until


def found(kind: type[Any], client_id: str, group: str | None = None) -> Any:
    """The one that is open under that client id."""
    ours = [each for each in gc.get_objects() if type(each) is kind and not each._closed]
    (one,) = (
        each
        for each in ours
        if (each.client if kind is AIOKafkaProducer else each._client)._client_id == client_id
        and getattr(each, "_group_id", None) == group
    )
    return one


def unexpected(*_: object, **__: object) -> Any:
    raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is gone")


async def test_a_worker_whose_reader_ended_answers_on(embedded_settings: Kafka) -> None:
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)) as w:
        assert (await peer.reply(await peer.rank("r0", "u", 30))).status == "ok"
        reader = found(AIOKafkaConsumer, "w1")
        reader._fetcher._get_actions_per_node = unexpected
        for number in range(1, 4):
            correlation = await peer.rank(f"r{number}", "u", 30)
            assert (await peer.reply(correlation)).status == "ok"
        await until(lambda: w.ready, "ready again")
        assert reader._fetcher._fetch_task.done()
        assert owned(w) == peer.topics.lanes
        assert w.context.registry.get_sample_value("relaygr_parts_made_anew_total", {"part": "the lanes' reader"})


async def test_a_worker_whose_producer_ended_answers_on(embedded_settings: Kafka) -> None:
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)) as w:
        assert (await peer.reply(await peer.rank("r0", "u", 30))).status == "ok"
        for producer in (found(AIOKafkaProducer, "w1-scores"), found(AIOKafkaProducer, "w1-others")):
            producer.client.send = unexpected
        for number in range(1, 4):
            correlation = await peer.rank(f"r{number}", "u", 30)
            assert (await peer.reply(correlation)).status == "ok"
        peer.statuses.clear()
        await until(lambda: peer.statuses, "a status")
        await until(lambda: w.ready, "ready again")


async def test_a_device_that_dies_while_the_worker_drains_leaves_no_request_without_an_answer(
    embedded_settings: Kafka,
) -> None:
    """It drained for its whole time, and what it had read got no answer."""
    settings = worker_settings(embedded_settings, drain_ms=60_000)
    async with Peer(embedded_settings) as peer, worker_on(settings) as w:
        w.model.hang = True
        correlations = [await peer.rank(f"r{number}", f"u{number}", 60) for number in range(3)]
        await until(lambda: len(w.worker._in_flight) == 3, "read")
        w.context.stop.set()
        consumer = w.worker._consumer
        assert consumer is not None
        await until(lambda: consumer._draining, "drains")

        def die(core: RelayCore, now: float) -> None:
            raise DeviceError("a defect")

        w.worker._device.submit(die)
        w.model.hang = False
        with pytest.raises(DeviceError, match="a defect"):
            await asyncio.wait_for(w.task, 30)
        assert {(await peer.reply(each)).status for each in correlations} <= {"ok", "failed"}
