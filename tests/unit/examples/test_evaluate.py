from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from examples.movielens.data import Histories, History
from examples.movielens.evaluate import (
    OFFLINE_FILE,
    TEST,
    VALIDATION,
    by_group,
    evaluate,
    ndcg,
    offline_ranks,
    paired_gain,
    popularity_ranks,
    quality,
    rank_of,
    split,
)
from relaygr_stream.models.api import KVLayout, KVRegion, ScoreInput, Tokens

ITEMS = 50


class NextNumber:
    """Scores the item behind the last one best, then by distance; it needs the last behaviour only."""

    layout = KVLayout(1, 1, 1, 1, torch.float32)
    version, note, incremental = "next", "", True
    tasks: tuple[str, ...] = ("next",)

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        keys, _ = kv.layer(0)
        keys[0, kv.length : kv.length + len(tokens), 0] = torch.from_numpy(tokens.array[0]).float()
        kv.length += len(tokens)

    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        (one,) = batch
        last = float(one.kv.layer(0)[0][0, one.kv.length - 1, 0])
        return [torch.from_numpy(-np.abs(one.candidates - last - 1))[:, None].float()]


class FarFromTheFirst(NextNumber):
    """Scores items by their distance from the oldest behaviour that it is given."""

    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        (one,) = batch
        return [torch.from_numpy(np.abs(one.candidates - float(one.kv.layer(0)[0][0, 0, 0])))[:, None].float()]


def history(*items: int) -> History:
    count = len(items)
    return History("u", np.array(items), np.zeros(count, np.int64), np.zeros(count, np.int64))


def test_ranks_equal_those_of_a_sorted_catalogue_without_the_history() -> None:
    draw = np.random.default_rng(3)
    for _ in range(200):
        scores = draw.normal(size=ITEMS).astype(np.float32)
        seen = draw.choice(ITEMS, 8, replace=False)
        target = int(draw.integers(ITEMS))
        order = sorted((item for item in range(ITEMS) if item == target or item not in seen), key=lambda i: -scores[i])
        assert rank_of(scores, target, seen) == order.index(target)


def test_equal_scores_count_against_the_model() -> None:
    assert rank_of(np.zeros(ITEMS, np.float32), 7, np.array([1, 2])) == ITEMS - 3


def test_metrics_equal_a_computation_by_hand() -> None:
    ranks = np.array([0, 2, 9, 10, 400])
    expected = (1 + 1 / math.log2(4) + 1 / math.log2(11)) / 5
    assert quality(ranks).hr == 3 / 5
    assert math.isclose(quality(ranks).ndcg, expected)


def test_the_target_is_not_among_the_behaviours_that_the_model_sees() -> None:
    user = history(1, 2, 3, 4, 5)
    seen, target, before = split(user, TEST, 2)
    assert (seen.items.tolist(), target, before.tolist()) == ([3, 4], 5, [1, 2, 3, 4])
    seen, target, before = split(user, VALIDATION, 10)
    assert (seen.items.tolist(), target, before.tolist()) == ([1, 2, 3], 4, [1, 2, 3])


def test_all_items_are_ranked_for_a_user_who_takes_items_again() -> None:
    assert split(history(1, 2, 1, 4), TEST, 3)[2].tolist() == []
    assert split(history(1, 2, 3, 2), TEST, 3)[2].tolist() == []
    assert split(history(1, 2, 3, 2), VALIDATION, 3)[2].tolist() == [1, 2]
    assert evaluate(NextNumber(), [history(4, 5, 6, 5)], ITEMS, 3, TEST).tolist() == [4]  # behind 7, 8, 6, and 9 as far


def test_evaluation_ranks_each_users_own_target() -> None:
    users = [history(1, 9, 20, 21), history(5, 6, 30, 33), history(4, 11, 10, 12)]
    # 33 behind 30: 31, then 32; 29 is as far as 33. The third: 11 comes first, but is in the history.
    assert evaluate(NextNumber(), users, ITEMS, 3, TEST).tolist() == [0, 3, 0]


def test_ranks_of_each_length_are_those_of_its_own_evaluation_and_kept_for_their_model(tmp_path: Path) -> None:
    draw = np.random.default_rng(4)
    users = [history(*draw.permutation(700)[:count]) for count in (201, 60, 200, 500, 501, 502, 199, 620)]
    data = Histories(users, [str(item) for item in range(700)], has_times=False)
    model, long = FarFromTheFirst(), [user for user in users if len(user) >= 200]
    found = offline_ranks(model, data, 550, tmp_path)
    assert list(found) == ["test", "25", "50", "100", "200", "500"]
    assert found["test"].tolist() == evaluate(model, users, 700, 550, TEST).tolist()
    for length in (25, 50, 100, 200, 500):
        assert found[str(length)].tolist() == evaluate(model, long, 700, length, TEST).tolist()
    model.score = lambda batch: []  # type: ignore[method-assign]  # not asked again
    assert {name: ranks.tolist() for name, ranks in offline_ranks(model, data, 550, tmp_path).items()} == {
        name: ranks.tolist() for name, ranks in found.items()
    }
    groups = by_group(data, {25: ndcg(found["25"])})
    assert [(name, len(curve[25])) for name, curve in groups.items()] == [
        ("users with 200 behaviours or more (6)", 6),
        ("users with 500 behaviours or more (4)", 4),
    ]


def test_kept_ranks_are_of_their_own_data_and_a_broken_file_is_written_anew(tmp_path: Path) -> None:
    def data(*items: int) -> Histories:
        return Histories([history(*items)], [str(item) for item in range(ITEMS)], has_times=False)

    first, other = data(4, 5, 6, 7), data(4, 5, 6, 9)
    assert offline_ranks(NextNumber(), first, 3, tmp_path)["test"].tolist() == [0]
    assert offline_ranks(NextNumber(), other, 3, tmp_path)["test"].tolist() == [2]
    whole = (tmp_path / OFFLINE_FILE).read_bytes()
    for cut in (0, 10, len(whole) // 2):
        (tmp_path / OFFLINE_FILE).write_bytes(whole[:cut])
        assert offline_ranks(NextNumber(), other, 3, tmp_path)["test"].tolist() == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == [OFFLINE_FILE]


def test_paired_gain_finds_a_small_gain_that_the_spread_between_users_hides() -> None:
    draw = np.random.default_rng(1)
    shorter = draw.uniform(0, 1, 2000)
    gain = paired_gain(shorter + 0.01 + draw.normal(0, 0.02, 2000), shorter)
    assert 0.008 < gain.low < gain.mean < gain.high < 0.012
    assert paired_gain(shorter, shorter) == (0, 0, 0)


def test_ndcg_is_zero_from_the_cut_off_on() -> None:
    assert ndcg(np.array([4, 5]), at=5).tolist() == [1 / math.log2(6), 0]


def test_popularity_counts_what_is_not_held_out() -> None:
    users = [history(3, 1, 2, 4, 0), history(3, 2, 0, 4), history(3, 1, 4, 2)]  # without the last two: 3 ×3, 1 ×2, 2 ×2
    data = Histories(users, [str(item) for item in range(5)], has_times=False)
    # Targets 4, 0 and 4 behind 3 1 2, 3 2 and 3 1; items are 3, 1, 2, 0, 4 by popularity, without the user's own.
    assert popularity_ranks(data, users, VALIDATION).tolist() == [1, 1, 2]
