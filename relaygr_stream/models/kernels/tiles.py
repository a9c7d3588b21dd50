"""The rows of a batch, cut into tiles: a table that one kernel launch walks.

A tile is a block of rows of one group and a range of the columns that those rows see. A group is a ranking, or a
prefill: a suffix without candidates. The table holds addresses, so that one launch serves any batch of regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr_stream.models.stu import RankingRows

#: Least columns of a part: four blocks of 64, so that a program can overlap loads with computation.
PART_COLUMNS: Final = 256
#: A group with fewer tiles than this is cut along its columns too. With four heads 64 tiles are 256 programs, about two
#: for each of the 132 multiprocessors of an H100. The cut depends on the group alone, so its neighbours in the batch
#: change no rounding. It also bounds the partial sums: 64 tiles × 64 rows × 4 heads × 64 wide are 4 MiB in float32.
GROUP_TILES: Final = 64
#: Alignment in bytes that the kernels' vector loads need; arenas and torch's allocators align to more.
ALIGNMENT: Final = 16


class TileField(IntEnum):
    """The columns of a table, int64 each. A row of zeros is a tile that does nothing."""

    ADDRESS = 0  # of the region's storage
    CAPACITY = 1  # of the region, in tokens
    LENGTH = 2  # tokens that the region holds: columns 0 … LENGTH - 1
    FIRST = 3  # the group's first row; its suffix rows are columns LENGTH … LENGTH + SUFFIX - 1
    SUFFIX = 4  # behaviours at the start of the group; its other rows are candidates
    ROW = 5  # the tile's first row
    ROW_STOP = 6
    COLUMN = 7  # the tile's first column
    COLUMN_STOP = 8
    PARTS = 9  # on the first of the consecutive tiles with these rows, their number; 0 on the others


def tile_table(groups: Sequence[RankingRows], block_rows: int, window: int) -> npt.NDArray[np.int64]:
    """The tiles (n, fields) of groups whose rows follow one another. window: as `max_attn_len`, 0 for none.

    Raises ValueError for a region that is not aligned to ALIGNMENT bytes.
    """
    tables, first = [np.zeros((0, len(TileField)), np.int64)], 0
    for group in groups:
        if group.suffix + group.candidates:
            tables.append(_tiles_of(group, first, block_rows, window))
        first += group.suffix + group.candidates
    return np.concatenate(tables)


def _tiles_of(group: RankingRows, first: int, block_rows: int, window: int) -> npt.NDArray[np.int64]:
    length, suffix, address = group.kv.length, group.suffix, group.kv.storage.data_ptr()
    if address % ALIGNMENT:
        raise ValueError(f"a region at address {address:#x} is not aligned to {ALIGNMENT} bytes")
    count = suffix + group.candidates
    # Longest first: the last rows of a prefill see the most columns, and the last tiles to start should be short.
    starts = np.arange(0, count, block_rows)[::-1]
    stops = np.minimum(starts + block_rows, count)
    # A candidate sees the whole history; a behaviour sees itself and older behaviours.
    column_stops = length + np.minimum(stops, suffix)
    columns = np.maximum(0, length + np.minimum(starts, suffix) - window) if window else np.zeros_like(starts)
    columns = np.minimum(columns, column_stops)
    most = max(1, GROUP_TILES // len(starts))
    parts = np.clip(-(-(column_stops - columns) // PART_COLUMNS), 1, most)
    row = np.repeat(np.arange(len(starts)), parts)
    part = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
    width = column_stops[row] - columns[row]
    table = np.empty((len(row), len(TileField)), np.int64)
    table[:, TileField.ADDRESS] = address
    table[:, TileField.CAPACITY] = group.kv.capacity
    table[:, TileField.LENGTH] = length
    table[:, TileField.FIRST] = first
    table[:, TileField.SUFFIX] = suffix
    table[:, TileField.ROW] = first + starts[row]
    table[:, TileField.ROW_STOP] = first + stops[row]
    table[:, TileField.COLUMN] = columns[row] + width * part // parts[row]
    table[:, TileField.COLUMN_STOP] = columns[row] + width * (part + 1) // parts[row]
    table[:, TileField.PARTS] = np.where(part == 0, parts[row], 0)
    return table


def is_split(table: npt.NDArray[np.int64]) -> bool:
    """Whether any rows of a table are cut along their columns."""
    return bool((table[:, TileField.PARTS] > 1).any())
