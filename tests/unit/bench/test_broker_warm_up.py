"""The bench's own broker: it runs as a lasting one, and compiles itself on messages that nobody else sees."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from relaygr_lab.bench.broker_warm_up import LANES, compile_broker

from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.ops.brokers.distribution import LASTING_RELAY
from relaygr_stream.ops.brokers.local import local_broker
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.topic_files import load_topics
from tests import needs


@pytest.mark.kafka
async def test_a_lasting_node_carries_messages_beside_the_benchs_topics(tmp_path: Path) -> None:
    needs.kafka_home()
    told: list[str] = []
    async with local_broker("kafka", folder=tmp_path, node=LASTING_RELAY) as broker:
        kafka = broker.kafka_settings(Kafka(prefix="bench.", partitions=16))
        await apply_topics(kafka)
        assert await compile_broker(kafka, told.append, seconds=1.0) >= LANES
        (java,) = [
            line for line in (process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"]))
            if line[:1] == ["java"] and any(str(tmp_path) in part for part in line)
        ]  # fmt: skip
        assert set(LASTING_RELAY.heap.split()) | {LASTING_RELAY.compilers} <= set(java)
        seen: list[object] = []
        ranking = load_topics(kafka).ranking
        async with TopicTail(kafka, ranking.name, range(ranking.partitions), "earliest", seen.extend):
            assert not seen
    assert told == ["the broker compiles what it will run, 1 s …"]
