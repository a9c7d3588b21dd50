"""Whether two models rank alike: the same model and a retrained one do, one with other item ids does not."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.models.api import ScoreInput, Tokens
from relaygr_stream.models.hstu_model import HSTUConfig, HSTUModel
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.loading import random_model
from relaygr_stream.ops.rollout.agreement import AT_ONCE, EXPIRES_S, LEAST_AGREEMENT, MIN_PAIRS, Pairs, agreement, ranks
from relaygr_stream.ops.rollout.judgement import MAX_PSI, psi
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import RankingRequest, ScoreReply
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_KIND, KIND_DELEGATED, Record
from tests.unit.client_peers import request
from tests.waiting import Clock

TASKS = ("click", "like")
Scoring = Callable[[RankingRequest], ScoreReply]


def record(value: object, correlation: bytes, *more: tuple[str, bytes]) -> Record:
    return Record("t", 0, 0, 1, b"u", encode(value), ((HEADER_CORRELATION, correlation), *more))  # type: ignore[arg-type]


def scored(*columns: np.ndarray, tasks: tuple[str, ...] = TASKS) -> ScoreReply:
    scores = np.stack(columns, axis=1).astype("<f4").tobytes()
    return ScoreReply(request_id="r", status="ok", outcome="full", scores=scores, tasks=tasks)


def unscored(status: str) -> ScoreReply:
    return ScoreReply(request_id="r", status=status)  # type: ignore[arg-type]


def exchange(pairs: Pairs, number: int, old: ScoreReply, new: ScoreReply, *, turned: bool = False) -> None:
    """One ranking of the old group, both answers in either order."""
    pairs.on_rankings([record(request(number), b"%d" % number)])
    (copy,) = pairs.take_due()
    answers = [record(old, b"%d" % number), record(new, copy.correlation)]
    for answer in reversed(answers) if turned else answers:
        pairs.on_answers([answer])


def played(old: Callable[[int], ScoreReply], new: Callable[[int], ScoreReply], count: int = MIN_PAIRS) -> Pairs:
    pairs = Pairs()
    for number in range(count):
        exchange(pairs, number, old(number), new(number), turned=number % 2 == 0)
    return pairs


def noisy(noise: float, size: int = 20, weight: float = 1.0) -> Callable[[int], ScoreReply]:
    """Scores of a model: what all know of the candidates, and what is its own."""

    def answer(number: int) -> ScoreReply:
        common = weight * np.random.default_rng(number).normal(size=size)
        own = noise * np.random.default_rng([number, int(1e3 * noise), 7]).normal(size=(2, size))
        return scored(common + own[0], -common + own[1])

    return answer


def test_copies_ask_for_the_same_ranking_in_full_and_keep_nothing() -> None:
    pairs = Pairs()
    asked = request(3, user_id="ann")
    pairs.on_rankings([record(asked, b"c")])
    (copy,) = pairs.take_due()
    assert pairs.take_due() == []
    same = ("user_id", "prefix", "suffix", "candidates", "columns", "history", "tenant", "v", "min_v")
    assert all(getattr(copy.request, name) == getattr(asked, name) for name in same)
    assert (copy.request.mode, copy.request.hops, copy.request.sent_ms) == ("full", 0, 0)
    assert copy.request.request_id != asked.request_id


def test_only_rankings_of_clients_are_copied_and_few_at_a_time() -> None:
    pairs = Pairs(clock := Clock())
    pairs.on_rankings(
        [
            record(request(), b"d", (HEADER_KIND, KIND_DELEGATED.encode())),
            record(msgspec.structs.replace(request(), hops=1), b"h"),
            Record("t", 0, 0, 1, b"u", b"\xc1", ((HEADER_CORRELATION, b"b"),)),
            Record("t", 0, 0, 1, b"u", encode(request()), ()),
        ]
    )
    assert pairs.take_due() == []
    many = [record(request(number), b"%d" % number) for number in range(10 * AT_ONCE)]
    pairs.on_rankings(many)
    assert len(pairs.take_due()) == AT_ONCE
    pairs.on_rankings(many)
    assert pairs.take_due() == []
    clock.now += EXPIRES_S + 1  # answers that never came
    pairs.on_rankings(many)
    assert len(pairs.take_due()) == AT_ONCE


def test_it_waits_for_pairs_and_says_how_many_it_has() -> None:
    found = played(noisy(0), noisy(0), MIN_PAIRS - 1).decide()
    assert (found.action, f"it has {MIN_PAIRS - 1}" in found.reason) == ("stay", True)
    late = played(noisy(0), lambda _: unscored("overloaded"), 3 * MIN_PAIRS).decide()
    assert (late.action, f"{3 * MIN_PAIRS} more were refused" in late.reason) == ("stay", True)


@pytest.mark.parametrize("noise", [0.0, 0.3, 0.7])
def test_models_that_rank_alike_go_on(noise: float) -> None:
    found = played(noisy(0.1), noisy(noise)).decide()
    assert found.action == "next", found.reason
    assert "click" in found.reason


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (noisy(1.0, weight=0.0), "rank correlation"),
        (noisy(0.1, weight=-1.0), "rank correlation"),
        (lambda _: scored(np.zeros(20), np.zeros(20)), "rank correlation 0.00"),
        (lambda _: scored(np.arange(20), tasks=("buy",)), "scores buy"),
        (lambda _: unscored("failed"), "50 of 50 rankings"),
        (lambda number: noisy(0)(number) if number % 4 else unscored("rejected"), "13 of 50 rankings"),
        (noisy(0, size=19), "50 of 50 rankings"),
        (lambda _: scored(np.full(20, np.nan), np.zeros(20)), "50 of 50 rankings"),
    ],
    ids=["other ids", "reversed", "constant", "other task", "failed", "rejected", "fewer scores", "nan"],
)
def test_each_kind_of_unlike_model_is_refused(new: Callable[[int], ScoreReply], reason: str) -> None:
    found = played(noisy(0.1), new).decide()
    assert found.action == "back"
    assert re.search(reason, found.reason), found.reason


@pytest.mark.parametrize("old", [unscored("failed"), msgspec.structs.replace(noisy(0)(1), truncated_to=64)])
def test_what_the_old_group_did_not_score_as_asked_is_no_pair(old: ScoreReply) -> None:
    pairs = played(lambda _: old, lambda _: unscored("failed"))
    assert (len(pairs), pairs.failed) == (0, 0)


def test_one_task_that_is_unlike_is_enough() -> None:
    def half(number: int) -> ScoreReply:
        right, wrong = noisy(0.1)(number).matrix(), noisy(1.0, weight=0.0)(number).matrix()
        return scored(right[:, 0], wrong[:, 1])

    assert "'like'" in played(noisy(0.1), half).decide().reason


def test_where_nothing_has_an_order_nothing_is_refused() -> None:
    """Emulated devices score zeros."""
    zeros = scored(np.zeros(20), np.zeros(20))
    assert played(lambda _: zeros, lambda _: zeros).decide().action == "next"


def test_single_candidates_are_compared_across_rankings() -> None:
    old, other = noisy(0.1, size=1), noisy(1.0, size=1, weight=0.0)
    assert played(old, noisy(0.2, size=1)).decide().action == "next"
    assert played(old, other, 200).decide().action == "back"


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=30), st.floats(0.01, 100), st.floats(-10, 10))
def test_ranks_know_order_and_ties_alone(values: list[int], scale: float, shift: float) -> None:
    scores = np.array(values, np.float32)
    found = ranks(scores)
    assert found.sum() == pytest.approx(0, abs=1e-9)
    assert np.abs(found).max() <= 0.5
    assert (np.sign(found[:, None] - found) == np.sign(scores[:, None] - scores)).all()
    several = len(set(values)) > 1
    assert agreement([(scores, scores)]) == (pytest.approx(1) if several else None)
    assert agreement([(scores, -scores)]) == (pytest.approx(-1) if several else None)


class Ranker:
    """A model of 500 items, ranking the same candidates for the same histories as the others."""

    def __init__(self, model: HSTUModel) -> None:
        self._model = model

    def __call__(self, number: int) -> ScoreReply:
        draw = np.random.default_rng(number)
        size = int(draw.integers(10, 60))
        tokens = Tokens(np.stack([draw.integers(0, 500, size), np.ones(size, np.int64), np.full(size, 1000)]))
        kv = KVRegion.new(self._model.layout, size)
        with torch.no_grad():
            self._model.prefill(kv, tokens)
            (scores,) = self._model.score([ScoreInput(kv, Tokens.zeros(0), draw.integers(0, 500, 20))])
        return scored(*scores.T, tasks=self._model.tasks)


def model(change: Callable[[dict[str, torch.Tensor]], None] = lambda _: None) -> HSTUModel:
    config = HSTUConfig(
        layers=2, dim=32, heads=2, dqk=8, dv=8, vocab=500, max_positions=128, scale_tokens=64, tasks=("click",)
    )
    weights = {name: value.clone() for name, value in random_model(config, 1).state_dict().items()}
    change(weights)
    return HSTUModel(config).load_weights(weights, note="")


def shuffled(weights: dict[str, torch.Tensor]) -> None:
    weights["embedding.item"] = weights["embedding.item"][torch.randperm(500, generator=torch.manual_seed(1))]


def shifted(weights: dict[str, torch.Tensor]) -> None:
    weights["embedding.item"] = weights["embedding.item"].roll(1, 0)


def trained_on(weights: dict[str, torch.Tensor]) -> None:
    generator = torch.manual_seed(2)
    for name, value in weights.items():
        weights[name] = value * (1 + 0.2 * torch.randn(value.shape, generator=generator))


@pytest.mark.parametrize("change", [shuffled, shifted])
def test_a_wrong_vocabulary_shows_in_the_order_alone(change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    old, new = Ranker(model()), Ranker(model(change))
    pooled = [np.concatenate([ranker(number).matrix()[:, 0] for number in range(MIN_PAIRS)]) for ranker in (old, new)]
    assert psi(*pooled) < MAX_PSI
    found = played(old, new).decide()
    assert found.action == "back"
    assert "rank correlation" in found.reason


def test_a_model_that_was_trained_on_ranks_alike() -> None:
    found = played(Ranker(model()), Ranker(model(trained_on))).decide()
    assert found.action == "next", found.reason
    assert float(found.reason.split()[-1]) > LEAST_AGREEMENT + 0.1
