"""The built-in ranking model: embeddings, HSTU stack and task head behind the model protocol.

Knows nothing of caches, schedulers or files; checkpoint.py and random_weights.py give it weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec
import torch
from msgspec import Meta
from torch import nn

from relaygr_stream.models.api import KVLayout, KVRegion, ScoreInput, Tokens, digest, version_of
from relaygr_stream.models.embeddings import TaskHead, TokenEmbedding
from relaygr_stream.models.hstu import FusedLayers, HSTUStack
from relaygr_stream.models.kernels.choice import Kernels, fused_stack
from relaygr_stream.models.kernels.graphs import CudaRecorder, RecordedScores, Recorder
from relaygr_stream.models.native.ends import NativeEnds, Sequences
from relaygr_stream.models.stu import RankingRows, StackConfig

Positive = Annotated[int, Meta(ge=1)]

#: Half-precision and float32 are what the kernels are written for and what the settings offer.
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class HSTUConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a model of this kind is, apart from its weights. scale_tokens is N of the scale 1/N."""

    layers: Positive
    dim: Positive
    heads: Positive
    dqk: Positive
    dv: Positive
    vocab: Positive
    max_positions: Positive
    scale_tokens: Positive
    tasks: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1)]
    contextual_seq_len: Annotated[int, Meta(ge=0)] = 0
    max_attn_len: Annotated[int, Meta(ge=0)] = 0
    group_norm: bool = False

    @property
    def stack(self) -> StackConfig:
        """The part that concerns the layers."""
        return StackConfig(
            self.layers,
            self.dim,
            self.heads,
            self.dqk,
            self.dv,
            self.scale_tokens,
            self.contextual_seq_len,
            self.max_attn_len,
            self.group_norm,
        )


class HSTUModel(nn.Module):
    """HSTU as a `RankingModel`. Made without values; `load_weights` gives them, `place` moves and converts them."""

    layout: KVLayout
    version: str
    note: str
    tasks: tuple[str, ...]
    incremental: bool

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = TokenEmbedding(config.dim, config.vocab, config.max_positions)
        self.stack = HSTUStack(config.stack)
        self.head = TaskHead(config.dim, len(config.tasks))
        self.layout = config.stack.layout(torch.float32)
        self.version = ""
        self.note = ""
        self.tasks = config.tasks
        self.incremental = self.stack.incremental
        self._digest = ""
        self._recorded: RecordedScores | None = None
        self._ends: NativeEnds | None = None

    def load_weights(self, weights: dict[str, torch.Tensor], note: str) -> HSTUModel:
        """Take float32 weights of exactly the keys and shapes of `state_dict()`, and a version from their digest."""
        self.load_state_dict(weights)
        self.note = note
        self._digest = digest(self.config, self.state_dict())
        return self.place(torch.device("cpu"), torch.float32)

    def place(self, device: torch.device, dtype: torch.dtype, kernels: Kernels = "auto") -> HSTUModel:
        """Move to `device` and convert all but the head to `dtype`; the version follows, since the scores do.

        kernels: as the setting worker.kernels. Raises ModelError if "triton" is asked for and cannot be had.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}; got {dtype}")
        self.embedding.to(device=device, dtype=dtype)
        self.stack.place(device, dtype)
        self.head.to(device=device)
        self._ends = self.stack.native_ends(self.embedding, self.head)
        self.layout = self.config.stack.layout(dtype)
        self.version = version_of("hstu", self._digest, dtype)
        fused = fused_stack(self.config.stack, device, dtype, kernels)
        self.use(fused, None if fused is None else CudaRecorder(device))
        return self

    def use(self, fused: FusedLayers | None, recorder: Recorder | None) -> None:
        """Attend through `fused` from here on, its launches recorded if that can be; None: plain torch operators."""
        self.stack.fused = fused
        self._recorded = None
        if fused is not None and recorder is not None:
            self._recorded = RecordedScores(self.embedding, self.stack, self.head, recorder)

    def warm_up(self, most: int) -> None:
        """Pay what the first extension or ranking of each size pays, up to so many rows."""
        self.stack.warm_up(most)

    @torch.no_grad()
    def extend(self, kv: KVRegion, tokens: Tokens) -> None:
        """Append the K/V of `tokens`; positions go on from kv.length. Errors as `HSTUStack.append`."""
        self.stack.append(kv, (self._ends or self.embedding).behaviours(tokens, kv.length))

    @torch.no_grad()
    def extend_in_steps(self, kv: KVRegion, tokens: Tokens) -> Iterator[None]:
        """As `extend`, a layer at a time."""
        yield from self.stack.append_in_steps(kv, (self._ends or self.embedding).behaviours(tokens, kv.length))

    @torch.no_grad()
    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        """Logits of each ranking, float32 (m_i, tasks). ModelError for a suffix where `incremental` is False."""
        if not batch:
            return []
        tokens = [(one.suffix, one.kv.length, one.candidates) for one in batch]
        rows = [RankingRows(one.kv, len(one.suffix), len(one.candidates)) for one in batch]
        counts = [one.candidates for one in rows]
        if self._recorded is not None:
            logits = self._recorded.logits(tokens, rows)
            if logits is not None:
                return list(torch.split(_of_candidates(logits, rows), counts))
        if self._ends is not None:
            sequences = Sequences(tokens)
            out = self.stack.score(rows, self._ends.embed(sequences))
            return list(torch.split(self._ends.logits(sequences, out), counts))
        out = _of_candidates(self.stack.score(rows, self.embedding.rankings(tokens)), rows)
        return list(torch.split(self.head.logits(out), counts))


def _of_candidates(out: torch.Tensor, batch: Sequence[RankingRows]) -> torch.Tensor:
    """The candidates' rows of all rows."""
    if not any(one.suffix for one in batch):
        return out
    return torch.cat(torch.split(out, [count for one in batch for count in (one.suffix, one.candidates)])[1::2])
