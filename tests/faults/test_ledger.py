"""The ledger can fail: each invariant broken in a doctored ledger is named, and a run without faults breaks none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgpack
import msgspec
import numpy as np
import pytest

from relaygr_stream.client import Ranking, RelayClient
from relaygr_stream.ops.children import stop_all
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.messages import Timings, WorkerStatus
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION
from relaygr_stream.workload.driver import Result, drive
from relaygr_stream.workload.items import WorkItem
from tests.e2e.fleet import TEST_SETTINGS, serving_fleet, traffic
from tests.faults.ledger import Copy, Ledger
from tests.faults.truth import Truth
from tests.faults.witness import Witness
from tests.statuses import lane_statuses, worker_status

ITEMS = traffic(seconds=1, rate=10)
RANKING, LANE = "ranking", 3


def ended(item: WorkItem, *, error: str | None = None, request_id: str = "", version: str = "m1") -> Result:
    scores = np.ones((20, 2), np.float32)
    ranking = Ranking(
        request_id=request_id or item.request.request_id,
        candidates=np.arange(20, dtype=np.uint32),
        scores=scores,
        tasks=("a", "b"),
        outcome="hbm",
        latency_s=1.0,
        timings=Timings(),
        worker="w1",
        model_version=version,
    )
    kept = None if error else ranking
    return Result(item, None if error else "hbm", error, "", 1.0, None if error else scores, kept)


def status(*, hbm: int = 10, pinned: int = 10, budget: int = 100, deviation: float = 0.0) -> WorkerStatus:
    lanes, counters = lane_statuses([0], budget_bytes=budget, pinned_bytes=pinned), {"audit_deviation": deviation}
    return worker_status("w1", lanes, model_version="m1", hbm_used_bytes=hbm, hbm_bytes=200, counters=counters)


def healthy() -> Ledger:
    """Requests answered, one of them by a typed error, one message dead-lettered, everything committed."""
    ledger = Ledger("m1", pinned_bytes=100)
    for at, item in enumerate(ledger.sending(ITEMS)):
        request = item.request.request_id
        ledger.rankings[RANKING, LANE, at] = Copy(request.encode(), request, sent_s=at)
        ledger.replied[request.encode()] += 1
        ledger.result(ended(item, error="DeadlineExceeded" if at == 1 else None))
        if at != 1:
            ledger.deviations[request] = 1e-6
    ledger.bad[RANKING, LANE, len(ITEMS)] = "malformed"
    ledger.letters[RANKING, LANE, len(ITEMS)].append("malformed")
    ledger.committed[RANKING, LANE] = ledger.log_ends[RANKING, LANE] = len(ITEMS) + 1
    ledger.status(status())
    ledger.pinned_at_rest["w1"] = 0
    ledger.exits.append(("w1", 0, 0))
    return ledger


FIRST = ITEMS[0].request.request_id
TIMED_OUT = ITEMS[1].request.request_id
DOCTORED: list[tuple[str, Callable[[Ledger], object]]] = [
    ("requests lost", lambda ledger: ledger.ends.pop(FIRST)),
    ("several ends", lambda ledger: ledger.result(ended(ITEMS[0], error="Overloaded"))),
    ("nobody sent", lambda ledger: ledger.sent.pop(FIRST)),
    ("sent twice", lambda ledger: ledger.sent.update([FIRST])),
    ("an error they cannot have", lambda ledger: ledger.ends.update({FIRST: ["Rejected"]})),
    ("further than 1e-05 from full", lambda ledger: ledger.deviations.update({FIRST: 1e-3})),
    ("further than 1e-05 from full", lambda ledger: ledger.deviations.update({FIRST: float("nan")})),
    ("nobody compared", lambda ledger: ledger.deviations.pop(FIRST)),
    ("own audit", lambda ledger: ledger.status(status(deviation=1e-4))),
    ("of another request", lambda ledger: _answer(ledger, request_id="other")),
    ("of another request or model", lambda ledger: _answer(ledger, version="m2")),
    ("bytes HBM", lambda ledger: ledger.status(status(hbm=201))),
    ("bytes pinned", lambda ledger: ledger.status(status(pinned=101))),
    ("granted to triggers", lambda ledger: ledger.status(status(budget=101))),
    ("pins leaked", lambda ledger: ledger.pinned_at_rest.update(w1=64)),
    ("committed and not done", lambda ledger: ledger.replied.pop(TIMED_OUT.encode())),
    ("stand still", lambda ledger: ledger.committed.update({(RANKING, LANE): 1})),
    ("without their dead letter", lambda ledger: ledger.letters.clear()),
    ("without their dead letter", lambda ledger: ledger.bad.update({(RANKING, LANE, len(ITEMS)): "oversized"})),
    ("good messages among", lambda ledger: ledger.letters[RANKING, LANE, 0].append("malformed")),
    ("ended otherwise", lambda ledger: ledger.exits.append(("w2", 70, 0))),
]


def _answer(ledger: Ledger, **changes: str) -> Ledger:
    ledger.ends.pop(FIRST)
    ledger.result(ended(ITEMS[0], **changes))
    return ledger


def test_nothing_is_said_of_a_healthy_run() -> None:
    healthy().check()


@pytest.mark.parametrize(("complaint", "doctor"), DOCTORED, ids=[what for what, _ in DOCTORED])
def test_each_broken_promise_is_named(complaint: str, doctor: Callable[[Ledger], object]) -> None:
    ledger = healthy()
    doctor(ledger)
    with pytest.raises(AssertionError, match=complaint):
        ledger.check()


def test_a_copy_is_answered_though_another_was_scored() -> None:
    """As after a hedge: two copies of one request, one answer."""
    ledger = healthy()
    original, hedge = ledger.rankings[RANKING, LANE, 0], (RANKING, LANE + 1, 0)
    ledger.rankings[hedge] = dataclasses.replace(original, hops=1)
    ledger.from_clients.add(hedge)
    ledger.committed[RANKING, LANE + 1] = 1
    with pytest.raises(AssertionError, match="1 records committed and not done"):
        ledger.check()
    ledger.replied[original.correlation] += 1
    ledger.check()


def test_lost_is_what_has_no_end_and_what_nobody_answered_committed_or_not() -> None:
    ledger = healthy()
    assert not ledger.lost
    ledger.ends.pop(FIRST)
    ledger.rankings["ranking", LANE + 1, 7] = Copy(b"never read", "never read")
    assert ledger.lost == [FIRST, f"never read at ranking[{LANE + 1}] 7"]
    assert not ledger.skipped


def test_a_forward_takes_the_place_of_the_copy_it_was_made_of() -> None:
    ledger = healthy()
    ledger.rankings[RANKING, LANE + 1, 0] = dataclasses.replace(ledger.rankings[RANKING, LANE, 0], hops=1)
    ledger.committed[RANKING, LANE + 1] = 1
    ledger.check()


def test_a_copy_without_an_answer_is_excused_only_where_a_broker_was_away_and_its_client_was_told() -> None:
    ledger = healthy()
    ledger.replied.clear()
    ledger.absences.append((-1.0, ledger.rankings[RANKING, LANE, 1].sent_s))  # of ITEMS 0 and 1
    with pytest.raises(AssertionError, match=f"{len(ITEMS) - 2} records committed and not done"):
        ledger.check()
    assert ledger.lost_answers == 2
    ledger.absences.append((0.0, 1e9))
    ledger.check()
    ledger.ends.pop(TIMED_OUT)
    with pytest.raises(AssertionError, match="1 records committed and not done"):
        ledger.check()


def test_the_truth_tells_users_and_sequences_apart() -> None:
    truth = Truth(TEST_SETTINGS)
    one, other = (item.request for item in ITEMS[:2])
    scores = truth.scores(one)
    assert truth.deviation(one, scores) == 0
    strangers = msgspec.structs.replace(one, prefix=other.prefix, suffix=other.suffix)
    shorter = msgspec.structs.replace(one, prefix=one.prefix.slice(0, len(one.prefix) - 1))
    assert truth.deviation(strangers, scores) > 1e-3
    assert truth.deviation(shorter, scores) > 1e-4


@pytest.mark.stack
async def test_a_run_without_faults_keeps_every_promise(embedded_settings: Kafka, tmp_path: Path) -> None:
    async with serving_fleet(embedded_settings, tmp_path, "w1", "w2") as fleet:
        async with Witness(fleet.settings) as witness, RelayClient(settings=fleet.settings) as client:
            items = traffic(seconds=4, rate=15)
            await drive(client, witness.ledger.sending(items), timeout=20.0, on_result=witness.result)
            route = [(HEADER_CORRELATION, b"bad-1"), (HEADER_REPLY_PARTITION, b"0")]
            for reason, value in (("malformed", b"\xc1"), ("unknown_version", msgpack.packb({"v": 9}))):
                for topic in (fleet.topics.ranking.name, fleet.topics.pre_infer.name):
                    await witness.send_bad(topic, value, reason, key=b"u", headers=route)
            await witness.rest()
            witness.expect_exits(await stop_all([fleet.children.pop(name) for name in ("trigger", "w1", "w2")]))
        assert len(witness.ledger.deviations) == len(items)
        assert len(witness.ledger.rankings) >= len(items)
        assert witness.ledger.committed
        witness.ledger.check()
        witness.ledger.deviations[next(iter(witness.ledger.deviations))] = 1.0
        with pytest.raises(AssertionError, match="from full inference"):
            witness.ledger.check()
