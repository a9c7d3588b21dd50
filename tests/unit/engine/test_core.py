"""What becomes of signals and rankings, case by case, with the real model and cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from relaygr_stream.engine import executor
from relaygr_stream.engine.commands import EraseUser, LanesLost
from relaygr_stream.wire.erase import Erase, user_mark
from tests.unit.engine.worlds import CONTEXTUAL, GRANULE_BYTES, MAX_TOKENS, Wrapped, history, world


def test_pre_inferred_prefix_is_hit_in_hbm() -> None:
    with world() as w:
        w.signal("r1", 1, 100)
        w.settle()
        w.rank("r1", 1, 100)
        w.settle()
        assert w.outcome("r1") == "hbm"
        assert w.answer("r1").measured.computed_tokens == 0


def test_ranking_before_the_pre_infer_is_done_joins_it() -> None:
    with world() as w:
        w.signal("r1", 1, 150)
        w.rank("r1", 1, 150)
        w.settle()
        assert w.outcome("r1") == "joined"


def test_ranking_without_a_signal_is_inferred_in_full_and_kept() -> None:
    with world() as w:
        w.rank("r1", 1, 100)
        w.settle()
        assert w.outcome("r1") == "full"
        w.rank("r2", 1, 100)
        w.settle()
        assert w.outcome("r2") == "hbm"


def test_mode_full_ignores_the_cache() -> None:
    with world() as w:
        w.signal("r1", 1, 100)
        w.settle()
        w.rank("r1", 1, 100, full=True)
        w.settle()
        assert w.outcome("r1") == "full"


def test_a_grown_history_is_extended_not_recomputed() -> None:
    with world() as w:
        w.signal("r1", 1, 100)
        w.rank("r1", 1, 100)
        w.settle()
        w.signal("r2", 1, 120)
        w.settle()
        assert w.scheduler.signals.counters.signal_extended == 1
        assert w.cache.counters.extended_in_place == 1
        w.signal("r3", 1, 180)
        w.settle()
        w.rank("r2", 1, 120)
        w.rank("r3", 1, 180)
        w.settle()
        assert w.outcome("r2") == "hbm"
        assert w.outcome("r3") in ("hbm", "joined")


def test_few_new_behaviours_are_scored_with_the_suffix_until_they_are_many() -> None:
    with world(lag=16) as w:
        w.signal("r1", 1, 100)
        w.settle()
        for number, length in enumerate((103, 110, 116), start=2):
            w.signal(f"r{number}", 1, length)
            w.rank(f"r{number}", 1, length)
            w.settle()
            assert w.outcome(f"r{number}") == "hbm"
        assert w.scheduler.signals.counters.signal_hbm == 3
        w.rank("unannounced", 1, 116)
        w.signal("r5", 1, 117)
        w.rank("r5", 1, 117)
        w.settle()
        assert w.outcome("unannounced") == "hbm"
        assert w.scheduler.signals.counters.signal_extended == 1
        entry, _ = w.cache.find("u1", history(1, 117))
        assert entry is not None
        assert len(entry.tokens) == 117


def test_while_many_are_appended_those_that_lack_few_need_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "MAX_CHUNK", 32)
    with world(lag=16) as w:
        w.signal("r1", 1, 100)
        w.settle()
        w.signal("r2", 1, 180)
        entry, _ = w.cache.find("u1", history(1, 180))
        assert entry is not None
        region = entry.region
        assert region is not None
        while region.length < 164:
            w.step()
        assert region.length < 180
        w.rank("r2", 1, 180)
        w.step()
        assert w.outcome("r2") == "hbm"
        assert region.length < 180


def test_a_model_that_wants_the_whole_sequence_lacks_nothing() -> None:
    with world(lag=16, kind=CONTEXTUAL) as w:
        w.signal("r1", 1, 100)
        w.settle()
        w.rank("r2", 1, 103, suffix=0)
        w.settle()
        assert w.outcome("r2") == "full"


@pytest.mark.parametrize("ranked", ["r1", "r2"])
def test_another_history_of_the_same_user_is_never_used(ranked: str) -> None:
    """Not even by the request whose own signal has pinned it."""
    with world() as w:
        w.signal("r1", 1, 100, version=0)
        w.settle()
        w.rank(ranked, 1, 100, version=1)
        w.settle()
        assert w.outcome(ranked) == "full"
        w.check_scores()


def test_ranking_extends_a_prefix_left_by_an_earlier_request() -> None:
    with world() as w:
        w.rank("r1", 1, 100)
        w.settle()
        w.rank("r2", 1, 110)
        w.settle()
        assert w.outcome("r2") == "joined"  # found, and not ready: ten tokens were computed first
        assert w.answer("r2").measured.computed_tokens == 10


def test_evicted_prefix_comes_back_from_dram() -> None:
    with world(hbm=9, dram=30) as w:  # 3 granules of scratch, 6 for entries: two users fit
        for user in range(5):
            w.signal(f"s{user}", user, MAX_TOKENS, life=0.5)
            w.settle()
            w.rank(f"s{user}", user, MAX_TOKENS)
            w.settle()
            w.now += 0.1
        assert w.cache.counters.spilled >= 3
        w.signal("back", 0, MAX_TOKENS)
        w.rank("back", 0, MAX_TOKENS)
        w.settle()
        assert w.outcome("back") == "dram"
        assert w.cache.counters.loaded == 1


def test_a_ranking_that_waits_for_the_copy_of_an_erased_user_brings_nothing_back() -> None:
    with world(hbm=9, dram=30) as w:
        for user in range(5):
            w.rank(f"r{user}", user, 150)
            w.settle()
        w.rank("longer", 0, MAX_TOKENS)
        assert w.cache.copying
        erase = Erase(id="0" * 16, user=user_mark("0" * 16, "u0"), sent_ms=1)
        assert w.handle(EraseUser(erase)) == 1
        w.settle()
        assert w.outcome("longer") == "full"
        assert w.cache.find("u0", history(0, MAX_TOKENS))[0] is None
        assert w.cache.counters.loaded == 1


def test_an_erased_users_replaced_sequence_goes_too() -> None:
    """Its pin kept it, and its ranking would have hit it until the end of the life window."""
    with world() as w:
        w.signal("old", 1, 100)
        w.settle()
        w.signal("new", 1, 60, version=1)
        w.settle()
        erase = Erase(id="0" * 16, user=user_mark("0" * 16, "u1"), sent_ms=1)
        assert w.handle(EraseUser(erase)) == 2
        assert (w.cache.pinned_bytes, len(w.scheduler.pins)) == (0, 0)
        w.rank("old", 1, 100)
        w.settle()
        assert w.outcome("old") == "full"


def test_life_window_ends_without_a_ranking() -> None:
    with world() as w:
        w.signal("r1", 1, 100, life=1.0)
        w.settle()
        assert w.scheduler.pins.lane_bytes(1) == 2 * GRANULE_BYTES
        w.now += 1.1
        w.settle()
        assert w.scheduler.pins.lane_bytes(1) == 0
        assert w.cache.pinned_bytes == 0
        assert w.scheduler.pins.expired == 1


def test_duplicate_signal_pins_once() -> None:
    with world() as w:
        w.signal("r1", 1, 100)
        w.signal("r1", 1, 100)
        w.settle()
        assert len(w.scheduler.pins) == 1
        assert w.scheduler.signals.counters.signal_duplicate == 1


def test_signal_behind_its_ranking_is_not_computed() -> None:
    with world() as w:
        w.rank("r1", 1, 100)
        w.settle()
        w.signal("r1", 1, 100)
        assert w.scheduler.signals.counters.signal_ranked == 1
        assert len(w.scheduler.pins) == 0


def test_pinned_share_is_guarded() -> None:
    with world() as w:
        for user in range(3):
            w.signal(f"r{user}", user, MAX_TOKENS)
        w.settle()
        assert w.scheduler.signals.counters.signal_over_footprint == 1
        assert w.cache.pinned_bytes <= w.limits.pinned_bytes


def test_expired_ranking_is_answered_without_device_time() -> None:
    with world() as w:
        w.rank("late", 1, 100, timeout=0.0)
        assert w.answer("late").status == "deadline_exceeded"
        w.rank("soon", 2, 100, timeout=0.5)
        w.now += 0.6
        w.settle()
        assert w.answer("soon").status == "deadline_exceeded"
        assert w.scheduler.time.full_ms == 0


def test_too_many_waiting_are_refused_at_once() -> None:
    with world() as w:
        for number in range(w.limits.queue_limit + 1):
            w.rank(f"r{number}", number % 7, 50)
        assert w.answer(f"r{w.limits.queue_limit}").status == "overloaded"
        w.settle()
        assert sum(answer.status == "ok" for answer in w.answers) == w.limits.queue_limit


def test_full_inference_without_room_waits_for_the_scratch() -> None:
    with world(hbm=6, dram=0) as w:
        w.signal("pin", 1, MAX_TOKENS, life=100.0)
        w.settle()
        for user in range(2, 6):
            w.rank(f"r{user}", user, MAX_TOKENS)
        w.settle()
        assert [w.outcome(f"r{user}") for user in range(2, 6)] == ["full"] * 4


def test_lost_lanes_release_their_pins() -> None:
    with world() as w:
        w.signal("r1", 1, 100)
        w.settle()
        w.handle(LanesLost(frozenset([1])))
        assert w.cache.pinned_bytes == 0


def test_empty_prefix_is_scored() -> None:
    with world() as w:
        w.rank("r1", 1, 0)
        w.settle()
        assert w.outcome("r1") == "full"


def test_audits_run_when_idle_and_agree() -> None:
    with world(audit_share=1.0) as w:
        for user in range(3):
            w.signal(f"r{user}", user, 60 + user)
            w.settle()
            w.rank(f"r{user}", user, 60 + user)
        w.settle()
        assert len(w.audits) == 3
        assert all(deviation <= 1e-5 for _, deviation in w.audits)


def test_audit_under_way_gives_its_scratch_to_a_request() -> None:
    with world(hbm=6, dram=0, audit_share=1.0) as w:
        w.signal("a", 1, MAX_TOKENS, life=100.0)
        w.settle()
        w.rank("a", 1, MAX_TOKENS)
        w.signal("b", 1, MAX_TOKENS, life=100.0)
        while not w.answers:
            w.step()
        w.step()  # the audit has borrowed the scratch
        assert not w.cache.scratch.free
        w.rank("c", 2, MAX_TOKENS)
        w.settle()
        assert w.outcome("c") == "full"
        assert len(w.audits) == 1


class Broken:
    """A model that fails while `broken`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def prefill(self, kv: Any, tokens: Any) -> None:
        if self.broken:
            raise RuntimeError("the device is on fire")
        self._model.prefill(kv, tokens)

    def score(self, batch: Any) -> Any:
        if self.broken:
            raise RuntimeError("the device is on fire")
        return self._model.score(batch)


@pytest.mark.parametrize("full", [False, True])
def test_a_failing_device_answers_typed_and_recovers(full: bool) -> None:
    with world(wrap=Broken) as w:
        w.model.broken = True  # type: ignore[attr-defined]
        w.signal("r1", 1, 100)
        w.rank("r1", 1, 100, full=full)
        w.settle()
        assert w.answer("r1").status == "failed"
        assert "on fire" in w.answer("r1").detail
        w.model.broken = False  # type: ignore[attr-defined]
        w.rank("r2", 1, 100)
        w.settle()
        assert w.outcome("r2") == "full"


def test_batched_failure_is_retried_one_by_one() -> None:
    with world(wrap=Broken) as w:
        for user in range(3):
            w.signal(f"r{user}", user, 40)
        w.settle()
        w.model.broken = True  # type: ignore[attr-defined]
        for user in range(3):
            w.rank(f"r{user}", user, 40)
        w.settle()
        assert [w.answer(f"r{user}").status for user in range(3)] == ["failed"] * 3


class OneBuffer(Wrapped):
    """A model whose scores are views of a buffer that its next call overwrites. most: candidates so far."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.buffer = torch.zeros(0)
        self.most = 0

    def score(self, batch: Any) -> Any:
        scores = torch.cat(super().score(batch))
        counts = [len(one.candidates) for one in batch]
        self.most = max(self.most, *counts)
        if len(self.buffer) < len(scores):
            self.buffer = torch.zeros_like(scores)
        self.buffer[: len(scores)] = scores
        return list(torch.split(self.buffer[: len(scores)], counts))


def test_an_answer_outlives_the_models_buffer() -> None:
    with world(wrap=OneBuffer) as w:  # the scores of all answers are compared at the end
        w.rank("r1", 1, 100, candidates=9)
        w.settle()
        w.rank("r2", 2, 80, candidates=5)
        w.settle()
        assert (w.outcome("r1"), w.outcome("r2")) == ("full", "full")


def test_the_warm_up_has_no_more_candidates_than_a_ranking() -> None:
    with world(wrap=OneBuffer) as w:
        scratch = w.cache.scratch.borrow()
        w.executor.warm_up(scratch, max_candidates=20)
        w.cache.scratch.give_back(scratch)
        assert w.model.most == 20  # type: ignore[attr-defined]
