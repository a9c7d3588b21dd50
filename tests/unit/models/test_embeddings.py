from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.models.api import Tokens
from relaygr_stream.models.embeddings import GAP_BUCKETS, gap_buckets
from tests.unit.models.small_models import SHAPE, random_tokens, small_model


@given(st.integers(-(2**62), 2**62))
def test_gap_buckets_are_powers_of_two(gap: int) -> None:
    expected = 0 if gap <= 0 else min(gap.bit_length(), GAP_BUCKETS - 1)
    # Beyond 2^53 a gap rounds to a float; by then all share the last bucket.
    assert gap_buckets(np.array([gap]))[0] == expected


def test_a_behaviour_is_the_sum_of_its_four_vectors() -> None:
    table = small_model().embedding
    array = np.array([[3, SHAPE["vocab"] + 3], [0, 255], [0, 1000]])
    x = table.behaviours(Tokens(array), 7)
    for row, (action, gap) in enumerate([(0, 0), (255, 10)]):
        expected = table.item[3] + table.position[7 + row] + table.action[action] + table.gap[gap]
        assert torch.allclose(x[row], expected)


def test_a_candidate_is_its_item_and_position_and_that_it_is_one() -> None:
    table, random = small_model().embedding, np.random.default_rng(0)
    x = table.rankings([(random_tokens(random, 2), 4, np.array([9, SHAPE["vocab"] * 2 + 1]))])
    for row, item in ((2, 9), (3, 1)):
        assert torch.allclose(x[row], table.item[item] + table.position[6] + table.candidate)


def test_indices_stay_within_the_tables_whatever_comes() -> None:
    table = small_model().embedding
    extreme = np.array([[2**32 - 1, -1], [255, 999], [2**62, -5]])
    assert table.behaviours(Tokens(extreme), 10**9).isfinite().all()
    assert table.rankings([(Tokens(extreme), 10**9, np.array([-1, 2**62]))]).isfinite().all()


EXTREME_IDS = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.sampled_from((0, 49, 50, -1, 2**32 - 1, 2**63 - 1, -(2**63)))
)


@given(st.lists(EXTREME_IDS, min_size=1, max_size=5), st.sampled_from((1, 7, 50)))
def test_an_item_has_its_own_row_and_an_unknown_id_the_row_of_the_formula(ids: list[int], oov_rows: int) -> None:
    """The documented formula in Python's integers, which do not overflow."""
    table = small_model(oov_rows=oov_rows).embedding
    rows, _ = table.ranking_rows([(Tokens(np.array([ids] * 3)), 0, np.array(ids))])

    def row(item: int) -> int:
        if 0 <= item < SHAPE["vocab"]:
            return item
        z = item % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return int(SHAPE["vocab"] + (z ^ (z >> 31)) % oov_rows)

    assert rows[0].tolist() == [row(each) for each in ids] * 2
    assert table.unknown_items == 2 * sum(not 0 <= each < SHAPE["vocab"] for each in ids)


@given(st.lists(EXTREME_IDS, min_size=1, max_size=5))
def test_without_rows_for_unknown_items_ids_count_modulo_the_vocabulary(ids: list[int]) -> None:
    rows, _ = small_model().embedding.ranking_rows([(Tokens(np.zeros((3, 0), np.int64)), 0, np.array(ids))])
    assert rows[0].tolist() == [each % SHAPE["vocab"] for each in ids]


def test_unknown_items_spread_over_the_rows() -> None:
    rows, _ = small_model(oov_rows=8).embedding.ranking_rows([(Tokens(np.zeros((3, 0), np.int64)), 0, np.arange(8050))])
    counts = np.bincount(rows[0], minlength=58)
    assert (counts[:50] == 1).all()
    assert (abs(counts[50:] - 1000) < 150).all()  # five standard deviations


def test_several_rankings_are_the_same_as_each_alone() -> None:
    table, random = small_model().embedding, np.random.default_rng(0)
    batch = [(random_tokens(random, n), n + 3, random.integers(0, 99, m)) for n, m in ((0, 2), (3, 1), (1, 4))]
    alone = torch.cat([table.rankings([one]) for one in batch])
    assert torch.equal(table.rankings(batch), alone)
