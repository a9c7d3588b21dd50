"""Softmax attention over per-head contiguous K/V, in blocks of rows; softmax runs in float32."""

from __future__ import annotations

import math
from typing import Final

import torch

#: Rows computed together: their scores over 4,096 tokens and 4 heads are 16 MiB in float32.
BLOCK_ROWS: Final = 256


def attend_to_history(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention: queries (H, n, dqk) are the rows of the last n columns; each sees itself and earlier columns.

    keys (H, columns, dqk), values (H, columns, dv); returns (H, n, dv).
    """
    heads, rows, _ = queries.shape
    out = torch.empty((heads, rows, values.shape[2]), dtype=values.dtype, device=values.device)
    first = keys.shape[1] - rows
    for start in range(0, rows, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, rows)
        scores = _scores(queries[:, start:stop], keys[:, : first + stop])
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu_(first + start + 1)
        scores.masked_fill_(hidden, -math.inf)
        out[:, start:stop] = _normalised(scores, values.dtype) @ values[:, : first + stop]
    return out


def attend_to_history_and_self(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, own_keys: torch.Tensor, own_values: torch.Tensor
) -> torch.Tensor:
    """Candidate attention: each row sees every column and itself, and no other row. Returns (H, m, dv).

    queries and own_keys (H, m, dqk), own_values (H, m, dv); keys (H, columns, dqk) and values (H, columns, dv) are read
    in place.
    """
    columns = keys.shape[1]
    out = torch.empty_like(own_values)
    for start in range(0, queries.shape[1], BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        own = (queries[:, block].float() * own_keys[:, block].float()).sum(-1, keepdim=True)
        own = (own / math.sqrt(queries.shape[2])).to(queries.dtype)
        weights = _normalised(torch.cat((_scores(queries[:, block], keys), own), 2), values.dtype)
        out[:, block] = weights[:, :, :columns] @ values + weights[:, :, columns:] * own_values[:, block]
    return out


def _scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return (queries / math.sqrt(queries.shape[2])) @ keys.transpose(1, 2)


def _normalised(scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.softmax(scores, dim=2, dtype=torch.float32).to(dtype)
