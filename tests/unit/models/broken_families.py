"""Models with features, with a state, or with steps of prefill, that break one property each; some break none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from examples.models.retention import Retention, RetentionConfig
from relaygr_stream.models.api import Tokens
from relaygr_stream.models.hstu_model import HSTUConfig, HSTUModel
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.loading import draw_weights
from relaygr_stream.wire.features import FeatureColumn, FeatureSchema
from tests.unit.models.broken_models import CONFIG, CPU, Batch, Plain

# ---- models with features ----

#: A column of every kind, dtype and table, some of them wide.
COLUMNS = (
    FeatureColumn(name="age", of="user", dtype="int32", rows=11),
    FeatureColumn(name="interests", of="user", dtype="float32", width=3),
    FeatureColumn(name="dwell_s", of="behaviour", dtype="float32"),
    FeatureColumn(name="place", of="behaviour", dtype="int64", width=2, rows=7),
    FeatureColumn(name="price", of="candidate", dtype="float32"),
    FeatureColumn(name="shop", of="candidate", dtype="int32", rows=13),
    FeatureColumn(name="affinity", of="cross", dtype="float32", width=2),
)


class Featured(HSTUModel):
    """The built-in model with features; it breaks nothing."""

    def __init__(self, dtype: torch.dtype, **changes: Any) -> None:
        shape = {"layers": 2, "dim": 16, "heads": 2, "dqk": 8, "dv": 8, "vocab": 50, "max_positions": 200}
        fields = {**shape, "scale_tokens": 64, "tasks": ("click", "like"), "features": COLUMNS, **changes}
        super().__init__(HSTUConfig(**fields))
        self.load_weights(draw_weights(self.state_dict(), 3), "random weights")
        self.place(CPU, dtype)


class KeepsUser(Featured):
    """The user's features are computed once for each history."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.known: dict[bytes, npt.NDArray[np.int64]] = {}

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        if tokens.context:
            key = tokens.array[:3, 1:9].tobytes() or bytes(1)
            first = self.known.setdefault(key, tokens.array[:, :1].copy())
            tokens = Tokens(np.concatenate([first, tokens.array[:, 1:]], axis=1)) if len(tokens) > 8 else tokens
        super().prefill(kv, tokens)

    def prefill_in_steps(self, kv: KVRegion, tokens: Tokens) -> Iterator[None]:
        self.prefill(kv, tokens)
        yield from ()


class LeaksCross(Featured):
    """The mean affinity of the last candidates goes into the keys of the next prefix."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.mean = 0.0

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        start = kv.length
        super().prefill(kv, tokens)
        kv.layer(1)[0][:, start : kv.length] += self.mean

    def score(self, batch: Batch) -> list[torch.Tensor]:
        self.mean = float(np.mean([one.features["affinity"].mean() for one in batch]))
        return super().score(batch)


class IgnoresColumn(Featured):
    """A column that is declared and not read."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.embedding.features.behaviour_dwell_s.zero_()  # type: ignore[union-attr,operator]


# ---- models that prefill in steps ----


class EarlyLength(Plain):
    """kv.length moves with the first step, the rest comes later."""

    def prefill_in_steps(self, kv: KVRegion, tokens: Tokens) -> Iterator[None]:
        self.prefill(kv, tokens)
        yield


class OneWorkspace(Plain):
    """All prefills keep their tokens between steps in one place."""

    kept: Tokens

    def prefill_in_steps(self, kv: KVRegion, tokens: Tokens) -> Iterator[None]:
        self.kept = tokens
        yield
        count = len(tokens)
        self.prefill(kv, Tokens(np.resize(self.kept.array, (len(tokens.array), count))))


class StepsRaise(Plain):
    def prefill_in_steps(self, kv: KVRegion, tokens: Tokens) -> Iterator[None]:
        yield
        raise RuntimeError("the workspace is too small")


class SharedWorkspace(Plain):
    """A step leaves what the next one needs where score puts its own."""

    scored = 0

    def score(self, batch: Batch) -> list[torch.Tensor]:
        self.scored += 1
        return super().score(batch)

    def prefill_in_steps(self, kv: KVRegion, tokens: Tokens) -> Iterator[None]:
        before = self.scored
        yield
        self.prefill(kv, tokens)
        if self.scored != before:
            keys, _ = kv.layer(0)
            keys[:, kv.length - len(tokens) : kv.length] += 1.0


# ---- models with a state ----


class Recurrent(Retention):
    """A state alone; it breaks nothing."""

    def __init__(self, dtype: torch.dtype) -> None:
        config = RetentionConfig(**{name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__})
        super().__init__(config, 3, CPU, dtype)


class RecurrentFeatured(Recurrent):
    """A state alone, and features of candidates; it breaks nothing."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.features = FeatureSchema([one for one in COLUMNS if one.of in ("candidate", "cross")])
        self.version += f"-{self.features.digest}"

    def score(self, batch: Batch) -> list[torch.Tensor]:
        return [
            scores + 0.01 * sum(torch.from_numpy(each).float().mean(1, keepdim=True) for each in one.features.values())
            for scores, one in zip(super().score(batch), batch, strict=True)
        ]


class LeaksIntoState(RecurrentFeatured):
    """The mean affinity of the last candidates goes into the next state."""

    mean = 0.0

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        super().prefill(kv, tokens)
        kv.state.add_(self.mean)

    def score(self, batch: Batch) -> list[torch.Tensor]:
        self.mean = float(np.mean([one.features["affinity"].mean() for one in batch]))
        return super().score(batch)


class OldState(Recurrent):
    """At length 0, it goes on from whatever the memory held."""

    def _states(self, kv: KVRegion) -> Iterator[torch.Tensor]:
        yield from kv.state.view(self.config.layers, self.config.heads, self.config.dqk, self.config.dv)


class WritesState(Recurrent):
    """score leaves the state behind the suffix."""

    def score(self, batch: Batch) -> list[torch.Tensor]:
        scores = super().score(batch)
        for one in batch:
            length = one.kv.length
            self.prefill(one.kv, one.suffix)
            one.kv.length = length
        return scores


class EarlyState(Recurrent):
    """The first step rewrites the state, the last one moves kv.length."""

    def prefill_in_steps(self, kv: KVRegion, tokens: Tokens) -> Iterator[None]:
        length = kv.length
        self.prefill(kv, tokens)
        kv.length = length
        yield
        kv.length = length + len(tokens)
