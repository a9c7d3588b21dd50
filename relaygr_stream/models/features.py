"""The embedding of feature columns in the built-in model: a vector of the model's width for each row of a table.

A table's vector is the sum of its columns'. A category has a row of a table for each of its values, summed over the
width; a value outside 0 … rows - 1 has row hash(value) mod rows (hashing.py). Numbers are multiplied by a
matrix (width, D). Sums are in float32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from relaygr_stream.models.hashing import oov_hash
from relaygr_stream.wire.features import FeatureColumn, FeatureSchema, Table, Values


class FeatureEmbedding(nn.Module):
    """The weights of a schema's columns: parameters OF_NAME, (rows, D) of a category, (width, D) of numbers."""

    def __init__(self, schema: FeatureSchema, dim: int) -> None:
        super().__init__()
        self.schema = schema
        self.dim = dim
        for one in schema.columns:
            rows = one.width if one.dtype == "float32" else one.rows
            self.register_parameter(_weight(one), nn.Parameter(torch.empty(rows, dim), requires_grad=False))

    @torch.no_grad()
    def forward(self, table: Table, values: Values, rows: int) -> torch.Tensor:
        """The table's vectors (rows, D). values: name → (rows, width)."""
        device, dtype = next(self.parameters()).device, next(self.parameters()).dtype
        total = torch.zeros((rows, self.dim), device=device)
        for one in self.schema.table(table):
            weight = getattr(self, _weight(one))
            if one.dtype == "float32":
                numbers = torch.from_numpy(np.array(values[one.name], np.float32)).to(device, non_blocking=True)
                total.addmm_(numbers, weight.float())
            else:
                index = torch.from_numpy(_table_rows(values[one.name], one.rows)).to(device, non_blocking=True)
                total += weight[index].float().sum(1)
        return total.to(dtype)


def _weight(column: FeatureColumn) -> str:
    return f"{column.of}_{column.name}"


def _table_rows(values: npt.NDArray[Any], rows: int) -> npt.NDArray[np.int64]:
    found = values.astype(np.int64)
    unknown = found.view(np.uint64) >= rows  # a negative value is a large unsigned one
    found[unknown] = oov_hash(found[unknown]) % rows
    return found
