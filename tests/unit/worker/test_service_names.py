"""Two workers of one name, on a real broker: the later one serves, and nobody else can say so."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import msgspec
import pytest

from relaygr_stream.bus.lanes import LaneConsumer
from relaygr_stream.bus.producer import Producer
from relaygr_stream.errors import ConfigError, Superseded
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.settings.worker import Handover
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.worker.status import gives_way_to
from tests.statuses import worker_status
from tests.unit.worker.services import Peer, worker_on, worker_settings
from tests.waiting import WITHIN_S, until


@pytest.mark.stack
async def test_the_later_of_one_name_serves_even_if_its_clock_is_behind(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = worker_settings(embedded_settings)
    async with Peer(embedded_settings) as peer, worker_on(settings) as first:
        await until(lambda: peer.statuses)
        real = time.time_ns
        monkeypatch.setattr("relaygr_stream.worker.status.time.time_ns", lambda: real() - 300 * 10**9)
        async with worker_on(settings) as second:
            with pytest.raises(Superseded, match="another worker named 'w1' started later"):
                await asyncio.wait_for(first.task, WITHIN_S)
            assert not second.task.done()
            assert (await peer.reply(await peer.rank("r", "u", 20))).status == "ok"


async def test_a_later_one_of_the_name_that_never_serves_ends_nobody(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = worker_settings(embedded_settings)
    async with Peer(embedded_settings) as peer, worker_on(settings) as first:

        async def refused(_: LaneConsumer, warm: object) -> None:
            """Not before the first one has heard of the second, as it starts."""
            await until(lambda: len({status.incarnation for status in peer.statuses}) == 2)
            heard = len(peer.statuses)
            await until(lambda: len(peer.statuses) >= heard + 10)
            raise ConfigError("kafka.session_timeout_ms: the broker refuses it")

        monkeypatch.setattr(LaneConsumer, "start", refused)
        with pytest.raises(ConfigError):
            async with worker_on(settings):
                pass
        assert not first.task.done()
        assert (await peer.reply(await peer.rank("r", "u", 20))).status == "ok"


@pytest.mark.stack
async def test_a_forged_status_ends_no_name_for_good_and_a_signed_fleet_believes_none(
    embedded_settings: Kafka,
) -> None:
    """Of a name that a forger made end, the next start serves; where a secret is set it does not even end."""
    secret = Handover(secret="a secret of the fleet")
    plain = worker_settings(embedded_settings)
    signed = msgspec.structs.replace(plain, handover=secret)
    topic = load_topics(embedded_settings).worker_status.name
    async with Peer(embedded_settings) as peer, Producer(embedded_settings, client_id="forger") as forger:
        for settings, ends in ((plain, True), (signed, False)):
            for most in (time.time_ns() + 86_000 * 10**9, 2**64 - 1):
                async with worker_on(settings) as w:
                    await until(lambda: peer.statuses and peer.statuses[-1].state == "serving")
                    forged = msgspec.structs.replace(peer.statuses[-1], incarnation=most, host="evil", lanes=())
                    await forger.send_and_wait(topic, encode(forged), key=b"w1")
                    if ends and most < 2**63:
                        with pytest.raises(Superseded):
                            await w.task
                        continue
                    heard = len(peer.statuses)
                    await until(lambda heard=heard: len(peer.statuses) >= heard + 10)  # type: ignore[misc]
                    assert (await peer.reply(await peer.rank("r", "u", 20))).status == "ok"
                    refused = "statuses_unreadable" if settings is plain else "statuses_unsigned"
                    await until(partial(w.total, refused), refused)


def test_two_that_start_at_once_agree_on_who_goes() -> None:
    def later(than: tuple[int, str, int], other: tuple[int, str, int]) -> bool:
        status = worker_status(incarnation=other[0], host=other[1], pid=other[2])
        return gives_way_to(status, *than)

    ours = (5, "host-b", 7)
    assert not later(ours, ours)  # our own status, read back
    for other in ((6, "host-a", 1), (5, "host-c", 1), (5, "host-b", 8)):
        assert later(ours, other)
        assert not later(other, ours)
