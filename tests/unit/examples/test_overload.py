from __future__ import annotations

import numpy as np

from examples.movielens.data import History
from examples.movielens.overload import CANDIDATES, Outcome, candidates_of

ITEMS = 400


def test_candidates_are_the_test_item_and_others_that_the_user_has_not_seen() -> None:
    items = np.random.default_rng(3).permutation(ITEMS)[:60]
    user = History("u", items, np.zeros(60, np.int64), np.zeros(60, np.int64))
    candidates, place = candidates_of(user, 5, ITEMS)
    assert candidates[place] == items[-1]
    assert len(set(candidates.tolist())) == CANDIDATES
    assert not set(candidates.tolist()) & set(items[:-1].tolist())
    assert np.array_equal(candidates, candidates_of(user, 5, ITEMS)[0])  # the same in each way of serving


def test_what_did_not_arrive_in_time_counts_of_all_as_popularity_ranks_it() -> None:
    popular = np.array([1, 2, 0, 30])
    came = np.array([0, -1, 2, 0])
    outcome = Outcome(came, in_time=np.array([True, False, True, False]), seconds=[0.01, 0.02, 9.0])
    outcome.counts["truncated"] = 1
    outcome.lengths.append(75)
    shown = outcome.line("name", popular).split()
    assert shown[1:6] == ["50.0%", "25.0%", "75", "0.8333", "0.5000"]  # NDCG 1, 1 / log2(4), and 1 too late
    nothing = Outcome(np.array([-1]), np.array([False])).line("nothing", np.array([2])).split()
    assert nothing[1:6] == ["0.0%", "0.0%", "–", "–", "0.5000"]
