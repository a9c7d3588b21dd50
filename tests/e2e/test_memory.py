"""What a worker process takes on is bounded, whatever senders ask and however long the device takes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.ops.children import Child
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.messages import RankingRequest, ScoreReply
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION, Record
from tests.e2e import gated
from tests.e2e.fleet import MIB, Fleet
from tests.waiting import until

REQUESTS = 150
TOKENS = 20_000
#: Of one request, as it came (14 bytes a token) and decoded (24): 150 are 109 MiB.
NBYTES = (14 + 24) * TOKENS
WAITING = 16 * MIB
#: Beside what waits: answers to fetches, of up to 4 MiB, read ahead and being copied, and the allocator's own.
BESIDE = 48 * MIB


@pytest.mark.stack
async def test_requests_that_wait_take_no_more_memory_than_allowed(
    embedded_settings: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: Counter[str] = Counter()

    def on_scores(records: list[Record]) -> None:
        answers.update(decode(ScoreReply, record.value).status for record in records)

    gate = tmp_path / "gate"
    monkeypatch.setenv(gated.GATE, str(gate))
    history = Behaviours.from_arrays(np.arange(TOKENS) % gated.POISON, np.zeros(TOKENS, int), np.arange(TOKENS) * 1000)
    value = encode(
        RankingRequest(
            request_id="r", user_id="hog", prefix=history, candidates=pack_items([1, 2]), timeout_ms=3.6e6, mode="full"
        )
    )
    async with Fleet(embedded_settings, tmp_path) as fleet:
        topics = fleet.topics
        tail = TopicTail(embedded_settings, topics.scores.name, [2], "latest", on_scores)
        child = fleet.start(
            "worker",
            "w1",
            f"worker.max_waiting_bytes={WAITING}",
            f"relay.max_prefix_tokens={TOKENS}",
            "worker.hbm_bytes=64MiB",
            "worker.max_timeout_ms=200000",  # longer than this test: nothing expires
            "kafka.max_poll_interval_ms=120000",  # the device stands still on purpose
            *gated.SETTINGS,
        )
        await fleet.ready("w1")
        await fleet.lanes_settled("w1")
        process = psutil.Process(child.pid)
        begun = process.memory_info().rss
        most = begun
        async with tail, Producer(embedded_settings, client_id="hog", acks=1, max_bytes=2 * MIB) as producer:
            gate.touch()
            for number in range(REQUESTS):
                headers = [(HEADER_CORRELATION, b"c%d" % number), (HEADER_REPLY_PARTITION, b"2")]
                await producer.send_and_wait(topics.ranking.name, value, key=b"u%d" % (number % 8), headers=headers)
                most = max(most, process.memory_info().rss)

            def all_read() -> bool:
                nonlocal most
                most = max(most, process.memory_info().rss)
                return read(child) == REQUESTS

            await until(all_read, f"all {REQUESTS} requests read")
            assert most - begun <= WAITING + BESIDE, f"{(most - begun) >> 20} MiB more than at the start"
            await until(lambda: answers["overloaded"] >= REQUESTS - 2 * WAITING // NBYTES, f"{answers}")
            gate.unlink()
            await until(lambda: sum(answers.values()) == REQUESTS, f"{answers}")
            assert set(answers) == {"ok", "overloaded"}
            assert answers["ok"] >= WAITING // NBYTES // 2


def read(worker: Child) -> int:
    """Ranking requests that the worker has read, while it lives."""
    assert worker.exit_code is None, f"the worker ended with {worker.exit_code}"
    return sum(int(one.value) for one in worker.samples() if one.name == "relaygr_rankings_read_total")
