"""The table: every visible pair in exactly one tile, and nothing of one group depends on another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.models.kernels.tiles import GROUP_TILES, PART_COLUMNS, TileField, tile_table
from relaygr_stream.models.kv import KVLayout, KVRegion
from relaygr_stream.models.stu import RankingRows
from tests.properties import examples
from tests.unit.models.naive_hstu import valid_attention

LAYOUT = KVLayout(1, 1, 4, 4, torch.float32)
groups = st.builds(
    lambda length, slack, suffix, candidates: RankingRows(
        KVRegion(LAYOUT, torch.zeros((length + slack) * 8), length + slack, length), suffix, candidates
    ),
    st.one_of(st.integers(0, 40), st.integers(0, 3000)), st.integers(0, 5), st.integers(0, 150), st.integers(0, 150),
)  # fmt: skip
windows = st.sampled_from([0, 1, 7, 300])


@settings(max_examples=examples(60))
@given(st.lists(groups, max_size=3), st.sampled_from([16, 64]), windows)
def test_each_row_covers_what_it_sees_once(batch: list[RankingRows], block: int, window: int) -> None:
    table = tile_table(batch, block, window)
    first = 0
    for group in batch:
        count, history = group.suffix + group.candidates, group.kv.length + group.suffix
        visible = valid_attention(history, group.candidates, 0, window)[group.kv.length :, :history]
        covered = np.zeros((count, history), np.int64)
        for tile in table[(table[:, TileField.ROW] >= first) & (table[:, TileField.ROW] < first + count)]:
            assert tile[TileField.FIRST] == first
            assert tile[TileField.ADDRESS] == group.kv.storage.data_ptr()
            assert 0 < tile[TileField.ROW_STOP] - tile[TileField.ROW] <= block
            rows = slice(tile[TileField.ROW] - first, tile[TileField.ROW_STOP] - first)
            covered[rows, tile[TileField.COLUMN] : tile[TileField.COLUMN_STOP]] += 1
        assert covered.max(initial=0) <= 1
        assert (covered[visible] == 1).all()
        first += count


@settings(max_examples=examples(60))
@given(st.lists(groups, max_size=3), windows)
def test_parts_follow_each_other(batch: list[RankingRows], window: int) -> None:
    table = tile_table(batch, 64, window)
    at = 0
    while at < len(table):
        parts = int(table[at, TileField.PARTS])
        assert parts >= 1
        together = table[at : at + parts]
        assert (together[:, TileField.ROW] == table[at, TileField.ROW]).all()
        assert (together[1:, TileField.PARTS] == 0).all()
        assert (together[1:, TileField.COLUMN] == together[:-1, TileField.COLUMN_STOP]).all()
        at += parts
    assert at == len(table)


@given(st.lists(groups, min_size=1, max_size=3), windows)
def test_a_groups_tiles_do_not_depend_on_the_others(batch: list[RankingRows], window: int) -> None:
    together, first, shift = tile_table(batch, 64, window), 0, 0
    for group in batch:
        alone = _shifted(tile_table([group], 64, window), shift)
        assert np.array_equal(together[first : first + len(alone)], alone)
        first, shift = first + len(alone), shift + group.suffix + group.candidates


def test_few_rows_are_cut_along_their_columns_and_many_are_not() -> None:
    region = KVRegion(LAYOUT, torch.zeros(16384 * 8), 16384, 16384)
    few, many = tile_table([RankingRows(region, 0, 64)], 64, 0), tile_table([RankingRows(region, 0, 64 * 64)], 64, 0)
    assert len(few) == GROUP_TILES
    assert ((few[:, TileField.COLUMN_STOP] - few[:, TileField.COLUMN]) == PART_COLUMNS).all()
    assert (many[:, TileField.PARTS] == 1).all()


def test_an_extension_computes_no_block_above_the_diagonal_and_the_longest_first() -> None:
    region = KVRegion(LAYOUT, torch.zeros(9000 * 8), 9000, 10)
    table = tile_table([RankingRows(region, 64 * 64, 0)], 64, 0)
    assert (table[:, TileField.COLUMN_STOP] == 10 + table[:, TileField.ROW_STOP]).all()
    assert (np.diff(table[:, TileField.COLUMN_STOP]) < 0).all()


def test_a_region_must_be_aligned() -> None:
    region = KVRegion(LAYOUT, torch.zeros(81)[1:], 10, 10)
    with pytest.raises(ValueError, match=r"address 0x[0-9a-f]+ is not aligned to 16 bytes"):
        tile_table([RankingRows(region, 1, 2)], 64, 0)


def _shifted(table: npt.NDArray[np.int64], rows: int) -> npt.NDArray[np.int64]:
    shifted = table.copy()
    shifted[:, [TileField.FIRST, TileField.ROW, TileField.ROW_STOP]] += rows
    return shifted
