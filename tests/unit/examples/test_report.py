from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from relaygr_lab.drawing import can_draw

from examples.movielens.__main__ import MOVIELENS_1M, Report, bounds_not_kept, table
from examples.movielens.data import Histories, History
from examples.movielens.picture import draw
from examples.movielens.serve import Latency, Served

EMPTY = np.zeros(0, np.int64)


def report(*, offline: list[int], served: list[int], users: int = 0, items: int = 10) -> Report:
    """A report in which these offline ranks were served as those."""
    people = [History(str(user), EMPTY, EMPTY, EMPTY) for user in range(users or len(offline))]
    data = Histories(people, [str(item) for item in range(items)], has_times=False)
    found = Report(data, np.array(offline), deviation=1e-6, checked=True, served_users=len(served))
    found.served.append(Served("auto", np.array(served), Counter(hbm=len(served) - 1, full=1)))
    return found


def test_equal_ranks_miss_no_target_on_data_without_a_target_of_quality() -> None:
    assert bounds_not_kept(report(offline=[0, 50, 7], served=[0, 50, 7]), judge_quality=True) == []


def test_a_rank_that_differs_when_served_misses_both_targets_of_equality() -> None:
    broken = bounds_not_kept(report(offline=[0] * 500, served=[0] * 499 + [1]), judge_quality=True)
    assert [line.split(" ")[0] for line in broken] == ["auto:", "auto:"]
    assert "99.80% of users have the offline rank" in broken[0]


def test_a_user_without_an_answer_counts_as_ranked_last() -> None:
    found = report(offline=[0, 0], served=[0, -1])
    assert found.served[0].quality == (0.5, 0.5)
    assert found.served[0].same(found.offline) == 0.5


def test_only_the_published_data_is_held_against_the_published_figures() -> None:
    users, items = MOVIELENS_1M
    published = report(offline=[100], served=[100], users=users, items=items)
    assert "gSASRec" in table(published)
    assert "bound: HR@10 0.2800, NDCG@10 0.1600" in bounds_not_kept(published, judge_quality=True)[0]
    assert bounds_not_kept(published, judge_quality=False) == []
    assert "gSASRec" not in table(report(offline=[100], served=[100]))


def test_a_length_is_compared_with_fifty_and_few_users_are_marked() -> None:
    found = report(offline=[0], served=[0])
    found.lengths = {"users with 200 behaviours or more (2)": {50: np.zeros(2), 200: np.array([0.5, 0.5])}}
    text = table(found)
    assert "+0.5000 [+0.5000, +0.5000]" in text
    assert "too few to conclude from" in text


@pytest.mark.skipif(not can_draw(), reason="needs matplotlib")
def test_the_picture_is_drawn_even_where_the_relay_never_hit(tmp_path: Path) -> None:
    nan = float("nan")
    latencies = [Latency(25, 3, 3, (2.0, 3.0), (1.0, 2.0)), Latency(50, 3, 0, (4.0, 5.0), (nan, nan))]
    curve = {25: np.array([0.1, 0.2]), 50: np.array([0.2, 0.3])}
    draw(tmp_path / "length.svg", {"all": curve}, latencies, 50.0, "What length buys")
    assert (tmp_path / "length.svg").stat().st_size > 1000
