"""Records that say, with the header `relaygr-kind`, that they are none of this release's messages: readers skip them,
count them, and neither dead-letter nor answer them."""

from __future__ import annotations

from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_KIND, HEADER_REPLY_PARTITION
from relaygr_stream.wire.topic_files import lane_of
from tests.unit.trigger.parts import event
from tests.unit.trigger.processes import peer_on, trigger_on
from tests.unit.worker.services import REPLY_PARTITION, Peer, worker_on, worker_settings
from tests.waiting import until

LATER = [(HEADER_KIND, b"of a later release")]


async def test_a_trigger_skips_them(embedded_settings: Kafka) -> None:
    async with peer_on(embedded_settings) as peer, trigger_on(embedded_settings) as trigger:
        lane = lane_of("u", peer.topics.lanes)
        await peer.producer.send_and_wait(
            peer.topics.retrieval.name, b"of any shape", key=b"u", partition=lane, headers=LATER
        )
        await peer.publish(event(25, "after", "u"))
        await until(lambda: peer.signalled == ["after"])
        assert trigger.count("records_skipped_total") == 1
        assert peer.letters == []


async def test_a_worker_skips_them_on_both_topics(embedded_settings: Kafka) -> None:
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)) as w:
        route = [(HEADER_CORRELATION, b"c"), (HEADER_REPLY_PARTITION, str(REPLY_PARTITION).encode())]
        await peer.send_ranking(b"of any shape", headers=[*route, *LATER])
        await peer.producer.send_and_wait(peer.topics.pre_infer.name, b"of any shape", key=b"u", headers=LATER)
        count = w.context.registry.get_sample_value
        await until(lambda: count("relaygr_records_skipped_total") == 2)
        assert (await peer.reply(await peer.rank("r", "u", 50))).status == "ok"
        assert b"c" not in peer.replies
        assert peer.dead == []
