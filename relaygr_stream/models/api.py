"""What a model and the worker exchange: tokens, prefix KV (kv.py), the `RankingModel` protocol, versions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.errors import ModelError
from relaygr_stream.models.kv import KVLayout, KVRegion
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.features import NO_FEATURES, FeatureSchema, Values

#: What the author of a model needs.
__all__ = [
    "KVLayout",
    "KVRegion",
    "RankingModel",
    "ScoreInput",
    "SteppedModel",
    "Tokens",
    "WarmedModel",
]

#: Rows of a token before its features: item, action, gap.
ROWS: Final = 3

#: The action of the token of user features. Actions on the wire are 0…255.
USER_ACTION: Final = -1


class Tokens(msgspec.Struct, frozen=True):  # built for every chunk; a frozen dataclass takes twice as long
    """n tokens on the host, as one int64 array (3 + words, n): item ids, action types, gaps in milliseconds, features.

    A token is a behaviour, or the first one the user's features: item 0, action USER_ACTION, gap 0. The gap of a
    behaviour is the time since the behaviour before it. It does not change when the sequence grows. words:
    FeatureSchema.words of the model, 0 if it reads no features.
    """

    array: npt.NDArray[np.int64]

    @classmethod
    def from_behaviours(
        cls,
        behaviours: Behaviours,
        previous_ms: int | None = None,
        schema: FeatureSchema = NO_FEATURES,
        user: Mapping[str, bytes] | None = None,
    ) -> Tokens:
        """Tokens of `behaviours`, behind one of the user's features if they are given.

        previous_ms: time of the behaviour before the first; None: the first gap is 0. The features were checked
        (FeatureSchema.check).
        """
        items, actions, times = behaviours.arrays()
        context = 0 if user is None else schema.context_tokens
        make = np.zeros if schema.words else np.empty  # every row is written where there are no features
        array = make((ROWS + schema.words, context + len(items)), np.int64)
        array[0, context:], array[1, context:] = items, actions
        if len(times):
            array[2, context] = 0 if previous_ms is None else max(0, int(times[0]) - previous_ms)
            np.subtract(times[1:], times[:-1], out=array[2, context + 1 :])
        if schema.words:
            schema.to_words("behaviour", behaviours.table, array[ROWS:, context:])
            if context and user:
                array[1, 0] = USER_ACTION
                schema.to_words("user", user, array[ROWS:, :1])
        return cls(array)

    @classmethod
    def zeros(cls, count: int, schema: FeatureSchema = NO_FEATURES) -> Tokens:
        """A sequence of `count` tokens, the user's among them, with all values 0: for measuring times."""
        array = np.zeros((ROWS + schema.words, count), np.int64)
        array[1, : schema.context_tokens] = USER_ACTION
        return cls(array)

    def __len__(self) -> int:
        count: int = self.array.shape[1]
        return count

    @property
    def context(self) -> int:
        """Tokens before the first behaviour: 1 if the first is the user's features, else 0."""
        return int(len(self) > 0 and self.array[1, 0] == USER_ACTION)

    def slice(self, start: int, stop: int) -> Tokens:
        """A view of tokens start:stop, with the same gaps."""
        return Tokens(self.array[:, start:stop])

    def followed_by(self, others: Tokens) -> Tokens:
        """These tokens and then others, copied."""
        return Tokens(np.concatenate([self.array, others.array], axis=1))

    def features(self, table: Literal["user", "behaviour"], schema: FeatureSchema) -> dict[str, npt.NDArray[Any]]:
        """The tokens' features, name → (n, width): of the user token alone, or of behaviours alone."""
        return schema.from_words(table, self.array[ROWS:])


@dataclass(frozen=True)
class ScoreInput:
    """One ranking, read only: prefix KV, n ≥ 0 suffix behaviours, m ≥ 1 candidate item ids (int64).

    features: of the candidates, and of candidate × user: name → (m, width).
    """

    kv: KVRegion
    suffix: Tokens
    candidates: npt.NDArray[np.int64]
    features: Values = field(default_factory=dict)


@runtime_checkable
class RankingModel(Protocol):
    """A generative recommender that the worker can serve as a relay. All calls come from one thread, under no_grad.

    It has two operations: append tokens to prefix KV, and score candidates against prefix KV. Prefill, chunked prefill
    and full inference all consist of these two, so a relayed and a full score agree by construction.

    layout: the shape of prefix KV.
    version: changes whenever the scores may change; the worker never uses prefix KV of another version.
    note: a remark on the weights for the log and the status ("random weights, seed 7"), or "".
    tasks: names of the score columns.
    incremental: True if appending tokens never changes the K/V of earlier tokens. False if it does (contextual tokens
        that see the whole history): the worker then computes a prefix in one call of `prefill`, never in chunks, and
        never appends to it; a request with a suffix is inferred in full, the suffix appended to the prefix, unless the
        model takes a suffix all the same (takes_suffix).

    A model with a state (layout.state) rewrites it in `prefill`, together with kv.length as the last thing it does: a
    call that fails, or steps that are abandoned, leave it as it was. Nothing else reads the region meanwhile.

    A model that reads features has an attribute `features` too, a FeatureSchema, whose digest its version contains.
    If the schema has user features, the first token of every sequence is the user's; no other one is.
    """

    layout: KVLayout
    version: str
    note: str
    tasks: tuple[str, ...]
    incremental: bool

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        """Append the K/V of `tokens` behind kv.length and advance kv.length by len(tokens).

        The caller ensures that kv.capacity is large enough. Tokens are read only: the cache compares the same array
        with later requests.
        """
        ...

    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        """Return the scores of each ranking, float32 (m_i, tasks) on the model's device. Does not modify the batch.

        The caller copies the scores before its next call, so they may be views of a buffer. A ranking's scores must not
        depend on the other rankings of the batch.
        """
        ...


def takes_suffix(model: RankingModel) -> bool:
    """Whether `score` takes a suffix behind a prefix: of an incremental model always, else its attribute of this name.

    A model with incremental = False that does is defined on the prefix and the suffix of a request apart: its prefix KV
    depend on the whole prefix and on nothing else, and its suffix rows on them and on earlier suffix rows. Its scores
    depend on where the client cuts a history, so the worker never moves that cut. Full inference is `prefill` of the
    whole prefix, then `score` with the suffix.
    """
    return model.incremental or bool(getattr(model, "takes_suffix", False))


def schema_of(model: RankingModel) -> FeatureSchema:
    """The features that the model reads."""
    schema: FeatureSchema = getattr(model, "features", NO_FEATURES)
    return schema


class WarmedModel(RankingModel, Protocol):
    """A model whose first call per size is slow in a way that the worker's warm-up cannot see. Optional."""

    def warm_up(self, most: int) -> None:
        """Compute once with every size up to `most` rows. The worker calls it once, before any other method."""
        ...


class SteppedModel(RankingModel, Protocol):
    """A model whose `prefill` can be interrupted. Optional; HSTU is one.

    The scheduler can then use longer, cheaper chunks at the same delay for a ranking that arrives meanwhile.
    """

    def prefill_in_steps(self, kv: KVRegion, tokens: Tokens) -> Iterator[None]:
        """As `prefill`, in steps of about equal duration, for example one layer each.

        Only the last step advances kv.length, and rewrites a state. Between steps the worker makes other calls, on this
        region too, which it reads up to kv.length, and steps of other prefills. The worker may abandon the remaining
        steps: data behind kv.length then has no meaning.
        """
        ...


# Versions: equal for the same model in every process, different as soon as scores may differ.


def digest(config: msgspec.Struct | Mapping[str, object], weights: Mapping[str, torch.Tensor]) -> str:
    """A 64-bit digest of a configuration and weights of any type, on any device, as 16 hexadecimal digits."""
    plain = msgspec.to_builtins(config, str_keys=True)  # keys that are numbers are sorted as text
    state = hashlib.blake2b(msgspec.json.encode(plain, order="sorted"), digest_size=8)
    for name in sorted(weights):
        value = weights[name].detach()
        # Digests of float32 weights are older than those of other types, and are kept.
        dtype = "" if value.dtype == torch.float32 else f" {value.dtype}"
        state.update(f"\n{name} {tuple(value.shape)}{dtype}\n".encode())
        state.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy().data)  # numpy has no bfloat16
    return state.hexdigest()


def version_of(
    architecture: str, weights_digest: str, dtype: torch.dtype, features: FeatureSchema = NO_FEATURES
) -> str:
    """The version of a model that computes in `dtype`; it names the dtype because rounding changes the scores.

    With features it ends with their digest.
    """
    version = f"{architecture}-{weights_digest}-{str(dtype).removeprefix('torch.')}"
    return f"{version}-{features.digest}" if features else version


def unknown_items(model: object) -> float:
    """A model's count of item ids outside its vocabulary; 0 for a model that counts none. Raises ModelError."""
    found = getattr(model, "unknown_items", 0)
    try:
        if math.isfinite(count := float(found)):
            return count
    except (TypeError, ValueError):
        pass
    raise ModelError(f"its `unknown_items` must be a count, found {found!r}")


def relative_deviation(relayed: npt.NDArray[np.float32], full: npt.NDArray[np.float32]) -> float:
    """The largest absolute difference, divided by the largest absolute full score.

    Infinite if a score is not finite or the shapes differ.
    """
    if relayed.shape != full.shape or not (np.isfinite(relayed).all() and np.isfinite(full).all()):
        return float("inf")
    scale = max(float(np.abs(full).max(initial=0.0)), float(np.finfo(np.float32).tiny))
    return float(np.abs(relayed - full).max(initial=0.0)) / scale
