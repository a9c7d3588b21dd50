"""The ledger counts every byte the owner has pinned or can still pin, whatever happens to statements and signals."""

from __future__ import annotations

from relaygr_stream.trigger.ledger import SETTLE_S, LaneLedger
from tests.unit.trigger.parts import lane_status

KEEP_S = 60.0


def fresh(log_end: int = 0, budget: int = 100, pinned: int = 0) -> LaneLedger:
    ledger = LaneLedger(log_end, KEEP_S, now_s=0.0)
    ledger.observe(lane_status(budget=budget, pinned=pinned, offset=log_end))
    return ledger


def fits(ledger: LaneLedger, nbytes: int) -> bool:
    """Whether there is room for a signal, where the owner has this lane alone."""
    return not ledger.on_hold and ledger.outstanding + nbytes <= ledger.budget


def admit(ledger: LaneLedger, nbytes: int, offset: int, now_s: float = 0.0) -> None:
    assert fits(ledger, nbytes)
    ledger.acknowledged(ledger.admit(nbytes), offset, now_s)


def test_nothing_fits_before_an_owner_has_spoken() -> None:
    assert not fits(LaneLedger(0, KEEP_S, now_s=0.0), 1)


def test_a_signal_counts_from_admission_until_the_owner_has_read_it() -> None:
    ledger = fresh(budget=100)
    pending = ledger.admit(60)
    assert ledger.outstanding == 60
    assert not fits(ledger, 41)
    assert fits(ledger, 40)
    ledger.acknowledged(pending, 0, 0.0)
    assert ledger.outstanding == 60
    ledger.observe(lane_status(budget=100, pinned=60, offset=1))
    assert ledger.outstanding == 60
    ledger.observe(lane_status(budget=100, pinned=0, offset=1))
    assert ledger.outstanding == 0


def test_a_statement_older_than_the_admission_frees_nothing() -> None:
    ledger = fresh(budget=100)
    admit(ledger, 60, 0)
    for _ in range(3):
        ledger.observe(lane_status(budget=100, pinned=0, offset=0))
        assert ledger.outstanding == 60


def test_a_signal_read_before_its_acknowledgement_came_is_counted_once() -> None:
    ledger = fresh(budget=100)
    pending = ledger.admit(60)
    ledger.observe(lane_status(budget=100, pinned=60, offset=1))
    ledger.acknowledged(pending, 0, 0.0)
    assert ledger.outstanding == 60


def test_acknowledgements_may_come_in_any_order() -> None:
    ledger = fresh(budget=100)
    first, second = ledger.admit(10), ledger.admit(20)
    ledger.acknowledged(second, 1, 0.0)
    assert ledger.on_hold  # offset 0 may be anyone's as yet
    ledger.acknowledged(first, 0, 0.0)
    ledger.observe(lane_status(offset=1))
    assert ledger.outstanding == 20
    assert not ledger.on_hold


def test_a_successor_that_starts_earlier_counts_again_what_it_reads_again() -> None:
    ledger = fresh(budget=100)
    for offset in range(5):
        admit(ledger, 20, offset)
    ledger.observe(lane_status(budget=100, pinned=0, offset=5))
    assert fits(ledger, 100)
    ledger.observe(lane_status(budget=100, pinned=0, offset=2))
    assert ledger.outstanding == 60
    assert not fits(ledger, 41)


def test_after_a_restart_nothing_is_admitted_until_the_owner_has_read_what_was_in_the_log() -> None:
    ledger = LaneLedger(7, KEEP_S, now_s=0.0)
    ledger.observe(lane_status(budget=100, offset=6))
    assert ledger.on_hold
    assert not fits(ledger, 1)
    ledger.observe(lane_status(budget=100, offset=7))
    assert fits(ledger, 100)


def test_signals_of_someone_else_put_the_lane_on_hold_until_they_are_read() -> None:
    ledger = fresh(log_end=7)
    admit(ledger, 10, 9)  # 7 and 8 are not ours
    assert ledger.on_hold
    ledger.observe(lane_status(offset=8))
    assert ledger.on_hold
    ledger.observe(lane_status(offset=9))
    assert not ledger.on_hold
    ledger.reconcile(12, 1.0)  # 10 and 11 neither
    assert ledger.on_hold
    ledger.observe(lane_status(offset=12))
    assert not ledger.on_hold


def test_our_own_signals_on_their_way_are_not_taken_for_someone_elses() -> None:
    ledger = fresh()
    pending = ledger.admit(10)
    ledger.reconcile(1, 1.0)
    ledger.acknowledged(pending, 0, 1.1)
    ledger.reconcile(1, 2.0)
    assert not ledger.on_hold


def test_an_end_within_a_batch_loses_nothing_of_it() -> None:
    """The embedded broker says so of every last batch; the log has it whole all the same."""
    ledger = fresh(budget=100)
    for offset in range(3):
        ledger.acknowledged(ledger.admit(20), offset, 1.0, batch=0)
    ledger.acknowledged(ledger.admit(10), 3, 1.0, batch=3)
    assert ledger.reconcile(1, 1.0 + SETTLE_S) == 1, "the log never had the second batch"
    assert ledger.outstanding == 60
    assert ledger.reconcile(1, 2.0 + SETTLE_S) == 0
    assert ledger.reconcile(0, 3.0 + SETTLE_S) == 3, "nor the first"
    assert ledger.outstanding == 0


def test_signals_that_the_log_lost_stop_counting() -> None:
    ledger = fresh(budget=100)
    admit(ledger, 30, 0, now_s=1.0)
    admit(ledger, 30, 1, now_s=1.0)
    assert ledger.reconcile(1, 1.0 + SETTLE_S - 0.1) == 0  # too soon to be sure
    assert ledger.outstanding == 60
    assert ledger.reconcile(1, 1.0 + SETTLE_S) == 1
    assert ledger.outstanding == 30
    admit(ledger, 10, 1, now_s=4.0)  # the offset is given anew, and that is no gap
    assert not ledger.on_hold


def test_a_topic_made_anew_blocks_nothing() -> None:
    ledger = LaneLedger(500, KEEP_S, now_s=0.0)
    ledger.observe(lane_status(budget=100, offset=0))
    assert ledger.on_hold
    ledger.reconcile(0, 1.0)
    assert fits(ledger, 100)
    admit(ledger, 50, 0, now_s=2.0)
    assert not ledger.on_hold


def test_a_failed_signal_counts_until_the_log_has_been_read_as_far_as_it_can_be() -> None:
    ledger = fresh(budget=100)
    pending = ledger.admit(60)
    ledger.failed(pending, 1.0)
    ledger.observe(lane_status(budget=100, offset=0))
    assert ledger.outstanding == 60
    ledger.reconcile(3, 1.0 + SETTLE_S)  # it is one of 0, 1, 2, or nowhere
    ledger.observe(lane_status(budget=100, offset=2))
    assert ledger.outstanding == 60
    ledger.observe(lane_status(budget=100, pinned=60, offset=3))
    assert ledger.outstanding == 60
    ledger.observe(lane_status(budget=100, pinned=0, offset=3))
    assert ledger.outstanding == 0


def test_a_failed_signal_of_an_empty_log_is_nowhere() -> None:
    ledger = fresh(budget=100)
    ledger.failed(ledger.admit(60), 1.0)
    ledger.reconcile(0, 1.0 + SETTLE_S)
    assert ledger.outstanding == 0


def test_what_the_log_keeps_no_longer_is_forgotten() -> None:
    ledger = LaneLedger(5, KEEP_S, now_s=0.0)
    ledger.observe(lane_status(budget=100, offset=4))
    pending = ledger.admit(10)
    ledger.acknowledged(pending, 5, 0.0)
    ledger.reconcile(6, KEEP_S - 1)
    assert ledger.on_hold
    assert ledger.outstanding == 10
    ledger.reconcile(6, KEEP_S + 1)
    assert not ledger.on_hold
    assert ledger.outstanding == 0
