"""What goes wrong around the core: duplicates, moved lanes, replaced sequences, failing devices, odd models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from relaygr_stream.cache.entry import EntryState
from relaygr_stream.errors import DeviceError
from relaygr_stream.worker.core import GIVE_UP_AFTER
from relaygr_stream.worker.costs import MIN_CHUNK
from relaygr_stream.worker.engine import CALM_CHUNKS
from tests.unit.worker.worlds import CONTEXTUAL, GRANULE_BYTES, MAX_TOKENS, World, Wrapped, history


@contextmanager
def world(**options: Any) -> Iterator[World]:
    made = World(**options)
    yield made
    made.settle()
    made.check_scores()
    made.core.check_integrity()
    made.now += 100.0
    made.settle()
    assert made.cache.pinned_bytes == 0
    made.close()


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
        assert len(w.core.pins) == 0


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
        assert w.core.pins.lane_bytes(1) == 2 * GRANULE_BYTES


def test_a_signal_after_its_lane_went_and_came_back() -> None:
    with world() as w:
        w.signal("r", 1, 100)
        w.settle()
        w.core.lanes_lost([1])
        w.signal("r", 1, 100)  # read again from the committed offset
        assert w.core.signals.counters.signal_hbm == 1
        w.rank("r", 1, 100)
        w.settle()
        assert w.outcome("r") == "hbm"


def test_demand_is_what_rankings_ask_for_and_goes_with_the_lane() -> None:
    with world() as w:
        w.signal("r", 1, 100)
        w.rank("r", 1, 100)
        w.rank("not admitted", 1, 60)
        assert (w.core.demand.totals[1], w.core.demand.largest(1)) == (3 * GRANULE_BYTES, 2 * GRANULE_BYTES)
        w.core.lanes_lost([1])
        assert (w.core.demand.totals.get(1), w.core.demand.largest(1)) == (None, 0)
        w.settle()


def test_what_signals_had_to_compute_is_counted_in_tokens() -> None:
    with world() as w:
        w.signal("new", 1, 100)
        w.settle()
        w.signal("there", 1, 100)
        w.signal("longer", 1, 120)
        w.settle()
        counters = w.core.signals.counters
        assert (counters.tokens_asked, counters.tokens_computed) == (320, 120)


def test_a_lane_lost_while_its_prefix_is_computed() -> None:
    with world() as w:
        w.signal("r", 1, MAX_TOKENS)
        begun = w.cache.find("u1", history(1, MAX_TOKENS))[0]
        assert begun is not None
        assert begun.region is not None
        while not begun.region.length:
            w.core.step(w.now)
        w.core.lanes_lost([1])
        w.settle()
        entry = w.cache.find("u1", history(1, MAX_TOKENS))[0]
        assert entry is not None  # what was computed is kept
        assert entry.state is EntryState.IDLE
        assert 0 < len(entry.tokens) < MAX_TOKENS
        assert w.cache.counters.cut_short == 1


# ---- signals that wait for the beginning of their sequence ----


def longer_signal_waits(w: World, life: float = 2.0) -> None:
    w.signal("short", 1, 100)
    w.signal("long", 1, 150, life=life)
    assert "long" in w.core.pins


def test_a_waiting_signal_is_in_the_books_from_when_it_was_read() -> None:
    """The trigger counts a signal as read, not as on its way, once the worker's position is past it."""
    with world() as w:
        longer_signal_waits(w)
        assert w.core.pins.lane_bytes(1) == (2 + 3) * GRANULE_BYTES
        w.settle()
        assert w.core.pins.lane_bytes(1) == (2 + 3) * GRANULE_BYTES
        w.rank("long", 1, 150)
        w.settle()
        assert w.outcome("long") in ("hbm", "joined")


def test_a_waiting_signal_ends_with_its_lane() -> None:
    with world() as w:
        longer_signal_waits(w)
        w.core.lanes_lost([1])
        w.settle()
        assert len(w.core.pins) == 0
        assert w.core.signals.counters.signal_extended <= 1


def test_a_waiting_signal_ends_with_its_life_window() -> None:
    with world() as w:
        longer_signal_waits(w, life=0.5)
        w.now += 0.6
        w.settle()
        assert "long" not in w.core.pins
        assert "short" in w.core.pins
        assert len(w.cache.find("u1", history(1, 150))[0].tokens) == 100  # type: ignore[union-attr]


def test_a_waiting_signal_ends_with_its_ranking() -> None:
    with world() as w:
        longer_signal_waits(w)
        w.rank("long", 1, 150, timeout=0.0)
        w.settle()
        assert "long" not in w.core.pins


def test_the_same_waiting_signal_twice_is_a_duplicate() -> None:
    with world() as w:
        longer_signal_waits(w)
        w.signal("long", 1, 150)
        assert w.core.signals.counters.signal_duplicate == 1


# ---- the footprint ----


def test_a_short_signal_on_a_long_entry_counts_what_the_entry_takes() -> None:
    """Seven granules fit beside the scratch region; the pinned share is six."""
    with world(hbm=12) as w:
        for user in (1, 2, 3):
            w.rank(f"r{user}", user, MAX_TOKENS)
            w.settle()
        for user in (1, 2, 3):
            w.signal(f"s{user}", user, 10)  # one granule would do, three are held
        assert w.cache.pinned_bytes == 6 * GRANULE_BYTES
        assert w.core.signals.counters.signal_over_footprint == 1


def test_a_signal_for_what_is_held_anyway_is_never_over_the_footprint() -> None:
    with world() as w:
        w.signal("a", 1, MAX_TOKENS)
        w.signal("b", 2, MAX_TOKENS)
        w.signal("c", 1, MAX_TOKENS)
        assert w.core.signals.counters.signal_over_footprint == 0
        assert len(w.core.pins) == 3


# ---- entries that are replaced ----


def test_a_ranking_of_a_replaced_sequence_keeps_what_it_holds() -> None:
    with world() as w:
        w.signal("old", 1, MAX_TOKENS, version=0)
        w.rank("old", 1, MAX_TOKENS, version=0)
        w.core.step(w.now)  # it is being computed, and the ranking waits
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
        assert w.answer("suffix").task.computed_tokens == 103
        assert [deviation <= 1e-5 for _, deviation in w.audits] == [True]


def test_a_contextual_prefix_is_inferred_in_one_piece() -> None:
    lengths: list[int] = []

    class Watched(Wrapped):
        def extend(self, kv: Any, tokens: Any) -> None:
            lengths.append(len(tokens))
            self.model.extend(kv, tokens)

    with world(kind=CONTEXTUAL, wrap=Watched) as w:
        w.signal("r1", 1, MAX_TOKENS)
        w.settle()
        w.rank("r2", 1, 100, suffix=16)
        w.settle()
    assert lengths == [MAX_TOKENS, 116]


# ---- devices and models that fail ----


@contextmanager
def failing(**options: Any) -> Iterator[tuple[World, Wrapped]]:
    with world(wrap=Wrapped, **options) as w:
        model = w.model
        assert isinstance(model, Wrapped)
        yield w, model


def test_out_of_memory_once_costs_half_a_chunk() -> None:
    with failing() as (w, model):
        model.error = torch.OutOfMemoryError("no")
        model.fail_extend = 1
        w.signal("r1", 1, MAX_TOKENS)
        w.settle()
        w.rank("r1", 1, MAX_TOKENS)
        w.settle()
        assert w.outcome("r1") == "hbm"
        totals = w.core.totals()
        assert (totals["out_of_memory"], totals["device_failures"]) == (1, 0)


def test_out_of_memory_is_tried_with_half_the_chunk_and_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    class Small(Wrapped):
        """A device that holds 64 tokens at a time."""

        def extend(self, kv: Any, tokens: Any) -> None:
            lengths.append(len(tokens))
            if len(tokens) > 64:
                raise torch.OutOfMemoryError("no")
            self.model.extend(kv, tokens)

    with world(wrap=Small) as w:
        monkeypatch.setattr(w.core._engine.costs, "chunk", lambda position, budget_ms: 128)
        w.rank("r1", 1, MAX_TOKENS)
        w.settle()
        assert w.outcome("r1") == "full"
    assert lengths == [128, 64, 64, 64]


def test_out_of_memory_twice_is_a_typed_failure() -> None:
    with failing() as (w, model):
        model.error = torch.OutOfMemoryError("no memory left")
        model.fail_extend = 2
        w.rank("r1", 1, 100)
        w.settle()
        assert w.answer("r1").status == "failed"
        assert "no memory left" in w.answer("r1").detail
        w.rank("r2", 1, 100)
        w.settle()
        assert w.outcome("r2") == "full"


@pytest.mark.parametrize("together", [1, 3])
def test_out_of_memory_while_scoring_is_tried_again(together: int) -> None:
    with failing() as (w, model):
        for user in range(together):
            w.signal(f"r{user}", user, 40)
        w.settle()
        model.error = torch.OutOfMemoryError("no")
        model.fail_score = 1
        for user in range(together):
            w.rank(f"r{user}", user, 40)
        w.settle()
        assert [w.outcome(f"r{user}") for user in range(together)] == ["hbm"] * together


def test_chunks_grow_again_when_memory_is_back() -> None:
    with failing() as (w, model):
        engine = w.core._engine
        model.error = torch.OutOfMemoryError("no")
        model.fail_extend = 1
        w.rank("r", 1, 100)
        w.settle()
        halved = engine._longest
        assert MIN_CHUNK <= halved <= 50
        number = 0
        while engine._longest < 2 * halved:
            number += 1
            w.rank(f"r{number}", number, MIN_CHUNK, full=True)
            w.settle()
            assert number <= CALM_CHUNKS
        assert number > CALM_CHUNKS - 8  # the first request took some chunks


def test_what_failed_does_not_stay_pinned() -> None:
    with failing() as (w, model):
        model.fail_extend = 1
        w.signal("r1", 1, 100, life=50.0)
        w.settle()
        assert (len(w.core.pins), w.cache.pinned_bytes, w.cache.entries) == (0, 0, 0)
        w.rank("r1", 1, 100)
        w.settle()
        assert w.outcome("r1") == "full"


def test_a_signal_that_waited_for_what_failed_is_computed_itself() -> None:
    with failing() as (w, model):
        w.signal("short", 1, 100)
        w.signal("long", 1, 150)
        model.fail_extend = 1
        w.settle()
        assert "short" not in w.core.pins
        w.rank("long", 1, 150)
        w.settle()
        assert w.outcome("long") == "hbm"


def test_an_audit_that_fails_is_dropped() -> None:
    """Once ended the device thread, and with it the worker."""
    with failing(audit_share=1.0) as (w, model):
        w.signal("r1", 1, 40)
        w.settle()
        w.rank("r1", 1, 40)
        while not w.answers:
            w.core.step(w.now)
        model.fail_extend = 1
        w.settle()
        assert w.outcome("r1") == "hbm"
        assert w.audits == []
        assert w.cache.scratch.free
        w.rank("r2", 1, 40)
        w.settle()
        assert len(w.audits) == 1


@pytest.mark.parametrize("fault", ["no progress", "one too many", "one too few", "wrong shape"])
def test_a_model_that_breaks_its_contract_fails_typed(fault: str) -> None:
    """Without progress the core once went round for ever; a wrong number of scores ended the device thread."""

    class Broken(Wrapped):
        def extend(self, kv: Any, tokens: Any) -> None:
            if fault != "no progress":
                self.model.extend(kv, tokens)

        def score(self, batch: Any) -> Any:
            rows = self.model.score(batch)
            changed = {"one too many": [*rows, *rows], "one too few": rows[1:], "wrong shape": [r[:1] for r in rows]}
            return changed.get(fault, rows)

    with world(wrap=Broken) as w:
        w.rank("r1", 1, 100)
        w.settle()
        assert w.answer("r1").status == "failed"
        assert "ModelError" in w.answer("r1").detail


def test_a_device_that_fails_whatever_it_is_given_is_given_up() -> None:
    with failing() as (w, model):
        model.fail_extend = 10**6
        for number in range(2 * GIVE_UP_AFTER):
            w.rank(f"r{number}", number, 100)
        with pytest.raises(DeviceError, match=f"cpu failed {GIVE_UP_AFTER} times in a row, at last with RuntimeError"):
            w.settle()
        assert [answer.status for answer in w.answers] == ["failed"] * GIVE_UP_AFTER
        model.fail_extend = 0  # so that the world may end in peace
        w.core._engine.failed_in_a_row = 0


def test_failures_with_a_success_between_are_not_the_device() -> None:
    with failing() as (w, model):
        for number in range(3 * GIVE_UP_AFTER):
            model.fail_extend = number % 2
            w.rank(f"r{number}", number, 100)
            w.settle()
        assert {answer.status for answer in w.answers} == {"ok", "failed"}


# ---- time and memory ----


def test_answered_requests_do_not_wait_for_their_deadline_in_memory() -> None:
    """A client with a timeout of an hour once cost the tokens of an hour of requests."""
    with world() as w:
        for number in range(400):
            w.rank(f"r{number}", number % 5, 10, timeout=3600.0)
            w.settle()
        assert len(w.core.rankings._deadlines) < 300
        assert len(w.core._queue._background._heap) < 300
        assert w.core.next_timer() is None


def test_queue_delay_tells_of_rankings_that_are_stuck() -> None:
    with world() as w:
        assert w.core.rankings.take_queue_ms(w.now) == 0.0
        w.rank("r1", 1, 100, timeout=10.0)
        w.now += 0.5
        assert w.core.rankings.take_queue_ms(w.now) == pytest.approx(500.0)
        w.settle()
        assert w.core.rankings.take_queue_ms(w.now) == pytest.approx(500.0)  # it had waited so long when it was taken
        assert w.core.rankings.take_queue_ms(w.now) == 0.0


def test_starved_full_inferences_go_by_deadline() -> None:
    with world(hbm=6, dram=0) as w:
        w.signal("pin", 1, MAX_TOKENS, life=100.0)
        w.settle()
        for user, timeout in ((2, 9.0), (3, 8.0), (4, 7.0)):
            w.rank(f"r{user}", user, MAX_TOKENS, timeout=timeout)
        w.settle()
        assert [answer.task.request_id for answer in w.answers] == ["r2", "r4", "r3"]  # the first had begun


def test_a_request_that_expires_in_the_scratch_region_gives_it_back() -> None:
    with world(hbm=6, dram=0) as w:
        w.signal("pin", 1, MAX_TOKENS, life=100.0)
        w.settle()
        w.rank("r2", 2, MAX_TOKENS, timeout=0.5)
        w.core.step(w.now)
        assert not w.cache.scratch.free
        w.now += 1.0
        w.settle()
        assert w.answer("r2").status == "deadline_exceeded"
        assert w.cache.scratch.free
