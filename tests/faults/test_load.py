"""The figures of the fault tests: what counts as recovered, in time, and silence."""

from __future__ import annotations

import numpy as np

from relaygr_stream.workload.driver import Result
from tests.e2e.fleet import traffic
from tests.faults.load import Note, impact

ITEMS = traffic(seconds=0.5, rate=20)


def note(sent: float, latency: float = 0.05, *, user: int = 0, error: str | None = None) -> Note:
    item = ITEMS[user]
    scores = None if error else np.ones((1, 1), np.float32)
    return Note(Result(item, None if error else "hbm", error, "", latency * 1000, scores, None), sent, sent + latency)


def test_a_fault_costs_what_was_late_or_lost_until_it_is_calm() -> None:
    healthy = [note(at / 10) for at in range(50)]
    fault = 5.0
    lost = [note(5.5, 3.0, error="DeadlineExceeded"), note(7.5, 1.0)]  # none in time in their seconds
    calm = [note(at / 10, user=1) for at in range(80, 120)]
    again = [note(15.5, 2.0)]  # after three calm seconds: another matter
    cost = impact([*healthy, *lost, *calm, *again], fault, over=9.0, hedge_s=0.2)
    assert abs(cost.patience_s - 0.25) < 1e-6
    assert (cost.recovery_s, cost.unscored_s) == (2.5, 2.0)
    assert cost.recovered(0.7)
    assert not cost.recovered(0.6)
    assert (cost.sent, cost.scored, cost.in_time) == (13, 12, 11)
    assert cost.silence_s == 3.0  # from 5.5 to the scores at 8.5
    assert cost.errors == {"DeadlineExceeded: ": 1}


def test_nothing_lost_is_no_recovery() -> None:
    cost = impact([note(at / 10) for at in range(150)], 5.0, over=8.0, hedge_s=0.2)
    assert cost.recovery_s == 0.0
    assert cost.in_time == cost.sent
