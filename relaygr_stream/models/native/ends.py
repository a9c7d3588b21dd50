"""The embedding and the head in C: tokens → vectors before the layers, outputs → logits behind them.

As torch operators these are a dozen small calls. Their code and tables leave the processor's caches between requests,
so they take a third of a ranking on a short prefix.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.models.native import arguments
from relaygr_stream.models.stu import NORM_EPS

if TYPE_CHECKING:
    from relaygr_stream.models.api import Tokens
    from relaygr_stream.models.embeddings import RankingTokens, TaskHead, TokenEmbedding


class NativeEnds:
    """The embedding and the head with a copy of their present weights, in the layers' dtype and width."""

    def __init__(self, compiled: ctypes.CDLL, embedding: TokenEmbedding, head: TaskHead) -> None:
        self._compiled = compiled
        compiled.relaygr_embed.restype = ctypes.c_int64
        self._embedding = embedding
        self._dtype, (self._dim, self._tasks) = embedding.item.dtype, head.weight.shape
        tables = embedding.item, embedding.action, embedding.position, embedding.gap, embedding.candidate
        of_head = head.norm_weight, head.norm_bias, head.weight.t(), head.bias
        self._weights = [part.contiguous() for part in (*tables, *of_head)]  # kept: the memory of these addresses
        addresses = [part.data_ptr() for part in self._weights]
        sizes = embedding.vocab, embedding.oov_rows, embedding.max_positions, self._dim
        self._tables = arguments.Tables(*addresses[: len(tables)], *sizes)
        self._head = arguments.HeadWeights(*addresses[len(tables) :], self._dim, self._tasks, NORM_EPS)

    def behaviours(self, tokens: Tokens, first: int) -> torch.Tensor:
        """As `TokenEmbedding.behaviours`."""
        return self.embed(Sequences([(tokens, first, _NO_CANDIDATES)]))

    def embed(self, sequences: Sequences) -> torch.Tensor:
        """As `TokenEmbedding.rankings`."""
        x = torch.empty((sequences.rows, self._dim), dtype=self._dtype)
        self._embedding.unknown_items += self._compiled.relaygr_embed(
            ctypes.byref(self._tables),
            sequences.array,
            ctypes.c_int64(len(sequences.array)),
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_int64(torch.get_num_threads()),
        )
        return x

    def logits(self, sequences: Sequences, outputs: torch.Tensor) -> torch.Tensor:
        """Logits (Σ candidates, tasks), float32, from the layers' outputs of all rows of `sequences`."""
        outputs = outputs.contiguous()
        logits = torch.empty((sequences.candidates, self._tasks))
        self._compiled.relaygr_logits(
            ctypes.byref(self._head), sequences.array, ctypes.c_int64(len(sequences.array)),
            ctypes.c_void_p(outputs.data_ptr()), ctypes.c_void_p(logits.data_ptr()),
            ctypes.c_int64(torch.get_num_threads()),
        )  # fmt: skip
        return logits


class Sequences:
    """A batch in the form that the C functions read. It keeps the arrays that its addresses point to."""

    def __init__(self, batch: Sequence[RankingTokens]) -> None:
        self.rows = self.candidates = 0
        self._kept: list[npt.NDArray[np.int64]] = []
        each = []
        for tokens, first, candidates in batch:
            items, actions, gaps = tokens.array  # checks the shape: the C code would read past the end of fewer rows
            pointers = map(self._address, (items, actions, gaps, candidates))
            each.append(arguments.Sequence(*pointers, len(tokens), len(candidates), first))
            self.rows += len(tokens) + len(candidates)
            self.candidates += len(candidates)
        self.array = (arguments.Sequence * len(each))(*each)

    def _address(self, numbers: npt.NDArray[np.int64]) -> int:
        if not (numbers.dtype == np.int64 and numbers.strides == (8,)):
            numbers = np.ascontiguousarray(numbers, np.int64)
        self._kept.append(numbers)
        address: int = numbers.__array_interface__["data"][0]
        return address


_NO_CANDIDATES = np.empty(0, np.int64)
