"""The embedding of feature columns in the built-in model: a vector of the model's width for each row of a table.

A table's vector is the sum of its columns'. A category has a row of a table for each of its values, summed over the
width; a value outside 0 … rows - 1 has row hash(value) mod rows (`oov_hash`). Numbers are multiplied by a
matrix (width, D). The columns of a table are embedded by one sum of rows and one product, whatever their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from relaygr_stream.wire.features import FeatureColumn, FeatureSchema, Table, Values


class _Joined(NamedTuple):
    """The weights of a table's categories, and of its numbers, one behind the other: (Σ rows, D), (Σ widths, D)."""

    categories: list[FeatureColumn]
    rows: torch.Tensor
    numbers: list[FeatureColumn]
    matrix: torch.Tensor


class FeatureEmbedding(nn.Module):
    """The weights of a schema's columns: parameters OF_NAME, (rows, D) of a category, (width, D) of numbers."""

    def __init__(self, schema: FeatureSchema, dim: int) -> None:
        super().__init__()
        self.schema = schema
        self.dim = dim
        self._joined: dict[Table, _Joined] = {}
        for one in schema.columns:
            self.register_parameter(_weight(one), nn.Parameter(torch.empty(_rows(one), dim), requires_grad=False))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self._joined.clear()  # the parameters move
        return super()._apply(fn, recurse)  # type: ignore[no-any-return,no-untyped-call]

    @torch.no_grad()
    def forward(self, table: Table, values: Values, rows: int) -> torch.Tensor:
        """The table's vectors (rows, D). values: name → (rows, width)."""
        joined = self._joined.get(table) or self._join(table)
        device, dtype = joined.rows.device, joined.rows.dtype
        total = torch.zeros((rows, self.dim), device=device)
        if joined.categories:
            first, index = 0, []
            for one in joined.categories:
                index.append(_table_rows(values[one.name], one.rows) + first)
                first += one.rows
            places = torch.from_numpy(np.concatenate(index, axis=1)).to(device, non_blocking=True)
            total += functional.embedding_bag(places, joined.rows, mode="sum")
        if joined.numbers:
            numbers = np.concatenate([values[one.name] for one in joined.numbers], axis=1, dtype=np.float32)
            total.addmm_(torch.from_numpy(numbers).to(device, non_blocking=True), joined.matrix.float())
        return total.to(dtype)

    def _join(self, table: Table) -> _Joined:
        columns = self.schema.table(table)
        categories = [one for one in columns if one.dtype != "float32"]
        numbers = [one for one in columns if one.dtype == "float32"]
        joined = _Joined(
            categories, self._one_behind_the_other(categories), numbers, self._one_behind_the_other(numbers)
        )
        self._joined[table] = joined
        return joined

    def _one_behind_the_other(self, columns: Sequence[FeatureColumn]) -> torch.Tensor:
        """The weights of these columns in one tensor, of which the parameters become views: no memory is held twice."""
        like = next(self.parameters())
        whole, first = torch.empty((sum(map(_rows, columns)), self.dim), device=like.device, dtype=like.dtype), 0
        for one in columns:
            part = whole[first : first + _rows(one)]
            parameter = self.get_parameter(_weight(one))
            part.copy_(parameter)
            parameter.data = part
            first += _rows(one)
        return whole


def _weight(column: FeatureColumn) -> str:
    return f"{column.of}_{column.name}"


def _rows(column: FeatureColumn) -> int:
    return column.width if column.dtype == "float32" else column.rows


def _table_rows(values: npt.NDArray[Any], rows: int) -> npt.NDArray[np.int64]:
    found = values.astype(np.int64)
    unknown = found.view(np.uint64) >= rows  # a negative value is a large unsigned one
    if unknown.any():
        found[unknown] = oov_hash(found[unknown]) % rows
    return found


def oov_hash(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The hash of ids outside a table: the finalizer of SplitMix64, elementwise.

    A 64-bit number for each 64-bit id, different for different ids.
    """
    z = ids.astype(np.uint64)  # two's complement
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
