"""What goes wrong around the core: duplicates, moved lanes, replaced sequences, odd models, time that passes."""

from __future__ import annotations

from typing import Any

import pytest

from relaygr_stream.cache.entry import EntryState
from relaygr_stream.engine.commands import LanesLost, Rank, RankTask
from tests.retained import retained
from tests.unit.engine.worlds import CONTEXTUAL, GRANULE_BYTES, MAX_TOKENS, Wrapped, history, world

# ---- the same request twice, and requests of lanes that move ----


@pytest.mark.parametrize("answered_first", [False, True])
def test_duplicate_rankings_are_both_answered(answered_first: bool) -> None:
    with world() as w:
        w.signal("r", 1, 100)
        first = w.rank("r", 1, 100)
        if answered_first:
            w.settle()
        second = w.rank("r", 1, 100)
        w.settle()
        assert [answer.task for answer in w.answers] == [first, second]
        assert {answer.status for answer in w.answers} == {"ok"}
        assert len(w.scheduler.pins) == 0


def test_a_pin_is_released_once_however_often_its_request_is_ranked() -> None:
    with world() as w:
        w.signal("a", 1, 100, life=50.0)
        w.signal("b", 1, 100, life=50.0)
        w.settle()
        entry = w.cache.find("u1", history(1, 100))[0]
        assert entry is not None
        assert entry.pins == 2
        for _ in range(3):
            w.rank("a", 1, 100)
            w.settle()
        assert entry.pins == 1
        assert w.scheduler.pins.lane_bytes(1) == 2 * GRANULE_BYTES


def test_a_signal_after_its_lane_went_and_came_back() -> None:
    with world() as w:
        w.signal("r", 1, 100)
        w.settle()
        w.handle(LanesLost(frozenset([1])))
        w.signal("r", 1, 100)  # read again from the committed offset
        assert w.scheduler.signals.counters.signal_hbm == 1
        w.rank("r", 1, 100)
        w.settle()
        assert w.outcome("r") == "hbm"


def test_a_lane_lost_while_its_prefix_is_computed() -> None:
    with world() as w:
        w.signal("r", 1, MAX_TOKENS)
        begun = w.cache.find("u1", history(1, MAX_TOKENS))[0]
        assert begun is not None
        assert begun.region is not None
        while not begun.region.length:
            w.step()
        w.handle(LanesLost(frozenset([1])))
        w.settle()
        entry = w.cache.find("u1", history(1, MAX_TOKENS))[0]
        assert entry is not None  # what was computed is kept
        assert entry.state is EntryState.IDLE
        assert 0 < len(entry.tokens) < MAX_TOKENS
        assert w.cache.counters.cut_short == 1


# ---- entries that are replaced ----


def test_a_ranking_of_a_replaced_sequence_keeps_what_it_holds() -> None:
    with world() as w:
        w.signal("old", 1, MAX_TOKENS, version=0)
        w.rank("old", 1, MAX_TOKENS, version=0)
        w.step()  # it is being computed, and the ranking waits
        w.signal("new", 1, MAX_TOKENS, version=1)
        w.rank("new", 1, MAX_TOKENS, version=1)
        w.settle()
        assert (w.outcome("old"), w.outcome("new")) == ("joined", "joined")
        assert w.cache.counters.opened == 2
        assert w.cache.find("u1", history(1, MAX_TOKENS, 1))[0] is not None


def test_a_replaced_entry_lives_as_long_as_its_pins() -> None:
    with world() as w:
        w.signal("old", 1, 100, version=0, life=5.0)
        w.settle()
        w.rank("new", 1, 100, version=1)
        w.settle()
        held = w.cache.pinned_bytes
        assert held == 2 * GRANULE_BYTES
        w.now += 6.0
        w.settle()
        assert w.cache.pinned_bytes == 0
        assert w.cache.hbm_used == (3 + 2) * GRANULE_BYTES  # scratch and the new one


# ---- sizes ----


def test_the_largest_request_and_the_smallest() -> None:
    with world() as w:
        w.signal("most", 1, MAX_TOKENS)
        w.rank("most", 1, MAX_TOKENS, suffix=16, candidates=2000)
        w.rank("least", 2, 0, suffix=0, candidates=1)
        w.rank("one", 3, 1, suffix=0, candidates=1)
        w.settle()
        assert w.outcome("most") == "joined"
        scores = [w.answer(name).scores for name in ("most", "least", "one")]
        assert [rows.shape for rows in scores if rows is not None] == [(2000, 2), (1, 2), (1, 2)]


# ---- a model that takes a sequence only whole ----


def test_a_contextual_model_end_to_end() -> None:
    with world(kind=CONTEXTUAL, audit_share=1.0) as w:
        w.signal("r1", 1, 100)
        w.settle()
        w.rank("r1", 1, 100, suffix=0)
        w.rank("suffix", 1, 100, suffix=3)
        w.rank("longer", 1, 120, suffix=0)
        w.rank("only suffix", 2, 0, suffix=3)
        w.rank("nothing", 3, 0, suffix=0)
        w.settle()
        outcomes = [w.outcome(name) for name in ("r1", "suffix", "longer", "only suffix", "nothing")]
        assert outcomes == ["hbm", "full", "full", "full", "full"]
        assert w.answer("suffix").measured.computed_tokens == 103
        assert [deviation <= 1e-5 for _, deviation in w.audits] == [True]


def test_a_contextual_prefix_is_inferred_in_one_piece() -> None:
    lengths: list[int] = []

    class Watched(Wrapped):
        def prefill(self, kv: Any, tokens: Any) -> None:
            lengths.append(len(tokens))
            self.model.prefill(kv, tokens)

    with world(kind=CONTEXTUAL, wrap=Watched) as w:
        w.signal("r1", 1, MAX_TOKENS)
        w.settle()
        w.rank("r2", 1, 100, suffix=16)
        w.settle()
    assert lengths == [MAX_TOKENS, 116]


# ---- time and memory ----


def test_answered_requests_do_not_wait_for_their_deadline_in_memory() -> None:
    """A client with a timeout of an hour once cost the tokens of an hour of requests."""
    with world() as w:
        for number in range(200):
            w.rank(f"r{number}", number % 5, 10, timeout=3600.0)
            w.settle()
        assert retained(w.scheduler, RankTask) < 150
        assert w.scheduler.next_timer() is None


def test_queue_delay_tells_of_rankings_that_are_stuck() -> None:
    with world() as w:
        assert w.scheduler.rankings.take_queue_ms(w.now) == 0.0
        w.rank("r1", 1, 100, timeout=10.0)
        w.now += 0.5
        assert w.scheduler.rankings.take_queue_ms(w.now) == pytest.approx(500.0)
        w.settle()
        assert w.scheduler.rankings.take_queue_ms(w.now) == pytest.approx(
            500.0
        )  # it had waited so long when it was taken
        assert w.scheduler.rankings.take_queue_ms(w.now) == 0.0


def test_queue_delay_leaves_out_what_the_history_store_took() -> None:
    with world() as w:
        task = w.ranking("by reference", 1, 100, timeout=10.0)
        w.now += 0.3
        w.handle(Rank(task, waited_s=0.3))
        w.now += 0.2
        assert w.scheduler.rankings.take_queue_ms(w.now) == pytest.approx(200.0)
        w.settle()
        assert w.scheduler.rankings.take_queue_ms(w.now) == pytest.approx(200.0)


def test_starved_full_inferences_go_by_deadline() -> None:
    with world(hbm=6, dram=0) as w:
        w.signal("pin", 1, MAX_TOKENS, life=100.0)
        w.settle()
        w.rank("r2", 2, MAX_TOKENS, timeout=9.0)
        for user, timeout in ((3, 8.0), (4, 7.0)):
            w.rank(f"r{user}", user, MAX_TOKENS, timeout=timeout)
        while not w.answers:
            w.step()
        w.rank("r5", 5, MAX_TOKENS, timeout=9.5)  # comes while the region is free, and overtakes no one
        w.settle()
        assert [answer.task.request_id for answer in w.answers] == ["r2", "r4", "r3", "r5"]  # the first had begun


def test_a_request_that_expires_in_the_scratch_region_gives_it_back() -> None:
    with world(hbm=6, dram=0) as w:
        w.signal("pin", 1, MAX_TOKENS, life=100.0)
        w.settle()
        w.rank("r2", 2, MAX_TOKENS, timeout=0.5)
        w.step()
        assert not w.cache.scratch.free
        w.now += 1.0
        w.settle()
        assert w.answer("r2").status == "deadline_exceeded"
        assert w.cache.scratch.free
