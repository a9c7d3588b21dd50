"""Serves a decoder with `past_key_values`: a module of Hugging Face's transformers, or your own that is called so.

    decoder(**inputs, past_key_values=…, use_cache=True[, position_ids=…][, attention_mask=…])

inputs are named tensors (B, n, …). Newer transformers call the past `cache`; either name will do. The result is a
tuple, or a transformers ModelOutput: first the hidden states (B, n, D), and by the past's name, or second, the K and V
of all tokens so far, for each layer a pair of (B, heads, tokens, width). Docs: docs/how-to/model.md.

A prefix is computed with the region's K and V as the decoder's past, and what the decoder returns for the new tokens is
written behind kv.length. A candidate is one further token behind prefix and suffix, and its hidden state gives its
scores. Candidates do not see each other, in one of two ways, which are equally exact:

- masked: one sequence of all candidates at one position, with a mask (1, 1, n, tokens + n) that is added to the
  attention's scores, for decoders that take such an `attention_mask`, and `position_ids` where positions matter
- else a batch of sequences, each of one candidate behind a copy of the past: any decoder takes that, and it takes
  longer than full inference with a mask
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from relaygr_stream.errors import ModelError
from relaygr_stream.models.api import ScoreInput, Tokens, digest, version_of
from relaygr_stream.models.kv import KVLayout, KVRegion
from relaygr_stream.wire.features import NO_FEATURES, FeatureSchema

#: Named inputs of a decoder, each with one row a token: (n, …).
Inputs = Mapping[str, npt.NDArray[Any] | torch.Tensor]
#: K and V of each layer: (B, heads, tokens, width).
Past = Sequence[tuple[torch.Tensor, torch.Tensor]]

#: What a decoder calls the K and V of earlier tokens.
PAST_NAMES: Final = ("past_key_values", "cache")
#: Candidates in one call with a mask: their scores against 4,096 tokens and 4 heads are 16 MiB in float32.
MASKED_ROWS: Final = 256
#: Largest difference, over the largest value, that a second candidate may make in a trial: rounding.
MASK_LIMIT: Final = {torch.float32: 1e-4}
HALF_MASK_LIMIT: Final = 2e-2
#: Bytes of the past in one call of a batch: it is copied for each candidate, and torch.cat copies it once more.
BATCH_BYTES: Final = 64 << 20


class DecoderModel(nn.Module):
    """A decoder with `past_key_values` as a `RankingModel`.

    decoder: computes hidden states, see above; it becomes of `dtype`, on `device`, in evaluation mode. head: a module,
    hidden states (m, D) → scores (m, tasks); it becomes float32. behaviours: the decoder's inputs of some tokens, and
    candidates: those of a ranking's candidates, each name → (rows, …); one that has weights must be a module. config:
    whatever scores depend on besides the weights, such as the number of heads; JSON. cache: makes what the decoder
    takes as its past of a tuple of pairs; `DynamicCache` for transformers. masked: candidates in one call with a mask.
    features: the schema of a decoder that reads feature columns.

    Raises ModelError if the decoder is not called so, or lets candidates see each other in spite of the mask.
    """

    incremental = True  # a decoder's token sees only earlier tokens

    def __init__(
        self,
        decoder: nn.Module,
        head: nn.Module,
        *,
        device: torch.device,
        dtype: torch.dtype,
        tasks: Sequence[str],
        config: Mapping[str, object],
        behaviours: Callable[[Tokens], Inputs],
        candidates: Callable[[ScoreInput], Inputs],
        cache: Callable[[Past], Any] = tuple,
        masked: bool = True,
        features: FeatureSchema = NO_FEATURES,
        note: str = "",
    ) -> None:
        super().__init__()
        self.decoder, self.behaviours, self.candidates = decoder, behaviours, candidates
        self.to(device=device, dtype=dtype)
        self.head = head.to(device=device, dtype=torch.float32)
        self.eval().requires_grad_(False)
        self.tasks = tuple(tasks)
        self.features = features
        self.note = note
        self._device = device
        self._cache = cache
        self._masked = masked
        self._takes_positions = _takes(decoder, "position_ids")
        self._past_name = next((name for name in PAST_NAMES if name in _parameters(decoder)), PAST_NAMES[0])
        self.layout = self._layout()
        if masked:
            self._try_mask()
        self.version = version_of(type(decoder).__name__, digest(config, self.state_dict()), dtype, features)

    @torch.no_grad()
    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        """Append the K/V of `tokens`, at positions from kv.length on."""
        start, stop = kv.length, kv.length + len(tokens)
        if start == stop:
            return
        _, past = self._append(self._behaviours(tokens), self._past(kv), start)
        for index, (keys, values) in enumerate(past):
            for target, source in zip(kv.layer(index), (keys, values), strict=True):
                target[:, start:stop] = source[0, :, start:]
        kv.length = stop

    @torch.no_grad()
    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        """Scores of each ranking, float32 (m_i, tasks)."""
        return [self._score(one) for one in batch]

    def _score(self, one: ScoreInput) -> torch.Tensor:
        past, length = self._past(one.kv), one.kv.length
        if len(one.suffix):
            _, past = self._append(self._behaviours(one.suffix), past, length)
            length += len(one.suffix)
        rows = self._tensors(self.candidates(one), len(one.candidates), "candidates")
        most = MASKED_ROWS if self._masked else max(1, BATCH_BYTES // self.layout.nbytes(length + 1))
        hidden = [
            self._apart({name: value[start : start + most] for name, value in rows.items()}, past, length)
            for start in range(0, len(one.candidates), most)
        ]
        scores: torch.Tensor = self.head(torch.cat(hidden).float())
        return scores

    def _append(self, rows: Mapping[str, torch.Tensor], past: Past, length: int) -> tuple[torch.Tensor, Past]:
        """Hidden states (n, D) of rows behind `length` tokens, each of which sees earlier ones, and the longer past."""
        stop = length + _count(rows)
        positions = torch.arange(length, stop, device=self._device)[None]
        hidden, past = self._call({name: value[None] for name, value in rows.items()}, past, positions)
        if (kept := {part.shape[2] for pair in past for part in pair}) != {stop}:
            raise ModelError(f"the decoder returned K and V of {sorted(kept)} tokens; a prefix must stay whole: {stop}")
        return hidden[0], past

    def _apart(self, rows: Mapping[str, torch.Tensor], past: Past, length: int) -> torch.Tensor:
        """Hidden states (m, D) of m rows at the position behind `length` tokens, none of which sees another one."""
        count = _count(rows)
        positions = torch.full((count, 1), length, device=self._device)
        if not self._masked:
            copies = [(keys.expand(count, -1, -1, -1), values.expand(count, -1, -1, -1)) for keys, values in past]
            hidden, _ = self._call({name: value[:, None] for name, value in rows.items()}, copies, positions)
            return hidden[:, 0]
        mask = torch.full((count, length + count), torch.finfo(self.layout.dtype).min, device=self._device)
        mask[:, :length] = 0
        mask[:, length:].fill_diagonal_(0)
        mask = mask.to(self.layout.dtype)[None, None]
        hidden, _ = self._call({name: value[None] for name, value in rows.items()}, past, positions.T, mask)
        return hidden[0]

    def _call(
        self, rows: Mapping[str, torch.Tensor], past: Past, positions: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Past]:
        more: dict[str, Any] = {"position_ids": positions} if self._takes_positions else {}
        more |= {} if mask is None else {"attention_mask": mask}
        more[self._past_name] = self._cache(tuple(past)) if past else None
        out = self.decoder(**rows, use_cache=True, **more)
        after = getattr(out, self._past_name, None)
        return out[0], [(keys, values) for keys, values, *_ in (out[1] if after is None else after)]

    def _past(self, kv: KVRegion) -> Past:
        """The region's tokens, read in place; nothing for none."""
        length = kv.length
        parts = (kv.layer(index) for index in range(self.layout.layers if length else 0))
        return [(keys[None, :, :length], values[None, :, :length]) for keys, values in parts]

    def _behaviours(self, tokens: Tokens) -> dict[str, torch.Tensor]:
        return self._tensors(self.behaviours(tokens), len(tokens), "behaviours")

    def _tensors(self, rows: Inputs, count: int, what: str) -> dict[str, torch.Tensor]:
        """The inputs on the device. Raises ModelError unless each has `count` rows."""
        # Arrays are copied: the caller's may be read only.
        found = {
            name: value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
            for name, value in rows.items()
        }
        if wrong := {name: tuple(value.shape) for name, value in found.items() if value.shape[:1] != (count,)}:
            raise ModelError(f"`{what}` of {count} rows returned {wrong}; each needs {count} rows")
        return {name: value.to(self._device, non_blocking=True) for name, value in found.items()}

    @torch.no_grad()
    def _layout(self) -> KVLayout:
        """What a token's K and V are, by a call with one token. Raises ModelError if the decoder is not called so."""
        rows = self._behaviours(Tokens.zeros(1, self.features))
        positions = torch.zeros((1, 1), dtype=torch.long, device=self._device)
        called = f"{type(self.decoder).__name__}({', '.join(rows)}, {self._past_name}, use_cache)"
        try:
            hidden, past = self._call({name: value[None] for name, value in rows.items()}, [], positions)
            shapes = {(*keys.shape, values.shape[3], keys.dtype) for keys, values in past}
        except Exception as error:  # a user's module may raise any exception
            raise ModelError(
                f"{called} must return hidden states, and as {self._past_name} (K, V) of each layer: "
                f"{type(error).__name__}: {error}"
            ) from error
        if hidden.shape[:2] != (1, 1) or len(shapes) != 1:
            raise ModelError(
                f"{called} returned, of one token, hidden states {tuple(hidden.shape)} and K, V of "
                f"{shapes or 'no layer'}; expected (1, 1, D), and for every layer the same (1, heads, 1, width)"
            )
        ((_, heads, _, dqk, dv, dtype),) = shapes
        return KVLayout(len(past), heads, dqk, dv, dtype)

    @torch.no_grad()
    def _try_mask(self) -> None:
        """Raise ModelError if a token's hidden state depends on the one before it, which the mask hides."""
        tokens = Tokens.zeros(2, self.features)
        tokens.array[0, tokens.context :] = range(1, 3 - tokens.context)
        rows = self._behaviours(tokens)
        advice = f"{type(self.decoder).__name__} takes no `attention_mask` (1, 1, n, tokens + n): give masked=False"
        try:
            both = self._apart(rows, [], 0)
            alone = self._apart({name: value[1:] for name, value in rows.items()}, [], 0)
        except Exception as error:  # a user's module may raise any exception
            raise ModelError(f"{advice}: {type(error).__name__}: {error}") from error
        difference = float((both[1:] - alone).abs().max() / alone.abs().max())
        if not difference <= MASK_LIMIT.get(self.layout.dtype, HALF_MASK_LIMIT):
            raise ModelError(f"{advice}: a candidate's hidden state changed by {difference:.1e} with another candidate")


def _takes(module: nn.Module, name: str) -> bool:
    """Whether the module's forward has this parameter, or takes any."""
    parameters = _parameters(module)
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.forward).parameters


def _count(rows: Mapping[str, torch.Tensor]) -> int:
    return len(next(iter(rows.values())))
