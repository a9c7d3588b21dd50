"""What the worker asks of a model: append tokens to prefix KV, score candidates against it. Nothing else.

Pre-inference, chunked pre-inference, extension and full inference are all made of these two operations, so a relayed
and a full score agree by construction (DESIGN §7).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.models.kv import KVLayout, KVRegion
from relaygr_stream.models.tokens import Tokens


@dataclass(frozen=True)
class ScoreInput:
    """One ranking: prefix KV (read only), the suffix behaviours (maybe none), m ≥ 1 candidate item ids (int64)."""

    kv: KVRegion
    suffix: Tokens
    candidates: npt.NDArray[np.int64]


@runtime_checkable
class RankingModel(Protocol):
    """A generative recommender that can be served as a relay. All calls come from one thread, under no_grad.

    layout: the prefix KV of a token.
    version: changes whenever the scores may change; prefix KV of another version are never used.
    note: what a person should know about the weights ("random weights, seed 7"), or "".
    tasks: names of the score columns.
    incremental: extending kv by tokens never changes what the earlier tokens stand for. False (contextual tokens that
        see the whole history): the prefix is inferred in one call of `extend`, never in chunks, never extended, and
        requests with a suffix are inferred in full with the suffix appended to the prefix.
    """

    layout: KVLayout
    version: str
    note: str
    tasks: tuple[str, ...]
    incremental: bool

    def extend(self, kv: KVRegion, tokens: Tokens) -> None:
        """Append the K/V of `tokens` behind kv.length and advance kv.length; the caller saw to kv.capacity."""
        ...

    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        """Scores of each ranking, float32 (m_i, tasks) on the model's device; kv stays as it is.

        A ranking's scores must not depend on the others in the batch (DESIGN §8).
        """
        ...


class SteppedModel(RankingModel, Protocol):
    """A model that can be interrupted within `extend`, which lets the scheduler make chunks several times as long
    (and so cheaper) at the same delay for a ranking that comes meanwhile. Optional; HSTU is one."""

    def extend_in_steps(self, kv: KVRegion, tokens: Tokens) -> Iterator[None]:
        """As `extend`, in steps of about the same time, for example one layer each.

        kv.length moves with the last step. Between steps other calls are made, on this region too (it is read up to
        kv.length), and the rest may never be asked for: what was written behind kv.length is then as good as nothing.
        """
        ...
