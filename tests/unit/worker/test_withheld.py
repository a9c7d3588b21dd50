"""worker.withhold_outcomes: nothing that a client reads tells whether a ranking found prefix KV, but its time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from relaygr_lab.processes import start_relay

from relaygr_stream.client.answers import ranking_of
from relaygr_stream.errors import ConfigError, Overloaded
from relaygr_stream.gateway.messages import Ranked
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.settings.worker import Worker
from relaygr_stream.wire.messages import HITS, MISSES, WITHHELD, ScoreReply, Status, Timings
from relaygr_stream.worker.replies import withheld
from relaygr_stream.workload.driver import DriveSummary
from relaygr_stream.workload.metrics import QualityMeter
from relaygr_stream.workload.report import live_line
from tests.unit.worker.services import Peer, worker_on, worker_settings
from tests.waiting import until

#: Fields in which answers to different requests differ whatever was found: the age is the sender's own.
OF_THE_REQUEST = {"request_id": "", "scores": b"", "timings": Timings()}


async def test_a_hit_and_a_miss_are_answered_alike_and_told_to_the_operator(embedded_settings: Kafka) -> None:
    settings = worker_settings(embedded_settings, withhold_outcomes=True)
    async with Peer(embedded_settings) as peer, worker_on(settings) as w:
        await peer.signal("hit", "u1", 40)
        await until(lambda: w.total("signals") == 1)
        hit = await peer.reply(await peer.rank("hit", "u1", 40))
        miss = await peer.reply(await peer.rank("miss", "u2", 40))
        late = await peer.reply(await peer.rank("late", "u3", 40, timeout_ms=0.001))
        assert (hit.outcome, hit.status, miss.status) == (WITHHELD, "ok", "ok")
        assert msgspec.structs.replace(hit, **OF_THE_REQUEST) == msgspec.structs.replace(miss, **OF_THE_REQUEST)
        for reply in (hit, miss, late):
            assert reply.timings == Timings(inbound_ms=reply.timings.inbound_ms)
            assert not reply.worker and not reply.admission
        assert late.status == "deadline_exceeded" and "passed" not in late.detail
        await until(lambda: peer.statuses[-1].counters.get("answers_ok") == 2.0)
        assert peer.statuses[-1].latencies is msgspec.UNSET
        assert {name for name in peer.statuses[-1].counters if not name.startswith("answers_")} <= {
            "signals", "delegated_pinned_bytes", "throttled_ms",
        }  # fmt: skip
        told = Counter[str]()
        for family in w.context.registry.collect():
            for sample in family.samples:
                if sample.name == "relaygr_answers_total" and sample.labels["status"] == "ok" and sample.value:
                    told[sample.labels["outcome"]] += int(sample.value)
        assert set(told) <= {*HITS, *MISSES} and told.total() == 2 and told["full"] == 1


async def test_by_default_answers_and_statuses_tell_everything(embedded_settings: Kafka) -> None:
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)):
        reply = await peer.reply(await peer.rank("miss", "u2", 40))
        assert (reply.outcome, reply.worker) == ("full", "w1") and reply.timings.computed_tokens == 40
        await until(lambda: peer.statuses[-1].counters.get("outcome_full") == 1.0)
        told = peer.statuses[-1]
        assert {outcome: sum(counts) for outcome, counts in (told.latencies or {}).items()} == {"full": 1}
        assert told.counters["within_slo"] in (0.0, 1.0)  # whether it was is the machine's speed


TELLING = ScoreReply(
    request_id="r",
    status="ok",
    outcome="truncated",
    scores=np.ones((2, 1), "<f4").tobytes(),
    tasks=("click",),
    detail="its prefix KV are with another worker",
    model_version="m",
    worker="w1",
    timings=Timings(inbound_ms=3.0, queued_ms=1.0, device_ms=2.0, worker_ms=4.0, computed_tokens=5),
    admission="delegated",
    truncated_to=64,
)


@pytest.mark.parametrize("status", ["ok", "deadline_exceeded", "overloaded", "failed"])
def test_what_is_withheld(status: Status) -> None:
    told = withheld(msgspec.structs.replace(TELLING, status=status, outcome="truncated" if status == "ok" else None))
    kept = {"request_id", "status", "scores", "tasks", "model_version"}
    for name in ScoreReply.__struct_fields__:
        if name in kept:
            assert getattr(told, name) == getattr(msgspec.structs.replace(TELLING, status=status), name)
    assert told.outcome == (WITHHELD if status == "ok" else None)
    assert (told.worker, told.admission, told.truncated_to) == ("", "", 0)
    assert told.timings == Timings(inbound_ms=3.0)
    assert "prefix" not in told.detail


def test_a_rejection_says_why() -> None:
    rejected = msgspec.structs.replace(TELLING, status="rejected", outcome=None)
    assert withheld(rejected) == rejected


def test_a_client_takes_it_and_counts_neither_a_hit_nor_a_miss() -> None:
    ranking = ranking_of(withheld(TELLING), np.array([1, 2]), 0.01)
    assert ranking.outcome == WITHHELD and WITHHELD not in HITS and WITHHELD not in MISSES
    assert Ranked.from_ranking(ranking, packed=True).outcome == WITHHELD
    summary = DriveSummary(sent=1)
    summary.outcomes[ranking.outcome] += 1
    assert "withheld 1" in live_line(summary, QualityMeter(), None)
    with pytest.raises(Overloaded, match="withhold"):
        ranking_of(withheld(msgspec.structs.replace(TELLING, status="overloaded", outcome=None)), np.array([]), 0.01)


def test_what_counts_hits_by_answers_refuses_workers_that_withhold_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="withhold_outcomes"):
        start_relay(Settings(worker=Worker(withhold_outcomes=True)), tmp_path, "t", ["w"])
