"""A device's times for the model's two operations and for copies between the tiers: measured, or given in a file.

extend(k tokens behind p) = e0 + e1·k + e2·k·(p + k/2)
score(rankings i)         = s0 + Σ (s1·m_i + s2·m_i·n_i)     m: suffix and candidates, n: prefix tokens

Each is multiplied by a random factor, drawn from the quantiles of measured / formula and correlated in time (noise.py).
The first operation after the device was idle takes longer, since its data has left the processor's caches.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import torch
from msgspec import Meta

from relaygr_stream.errors import InputError
from relaygr_stream.models.kv import KVLayout
from relaygr_stream.settings.inputs import read_text

#: On two cores during a bench, device times correlate like those of messages (bus.py).
LASTING_MS: Final = 10.0
#: A device whose full inference takes no time per token has no longest prefix; the search ends here.
MOST_TOKENS: Final = 1 << 30

NotNegative = Annotated[float, Meta(ge=0)]
Above = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Factors = Annotated[tuple[Annotated[float, Meta(gt=0)], ...], Meta(min_length=1)]


class KV(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of prefix KV. state: elements beside the tokens, whatever their number."""

    layers: Count
    heads: Count
    dqk: Count
    dv: Count
    dtype: Literal["float32", "bfloat16", "float16"]
    state: Count = 0
    times: bool = False

    def __post_init__(self) -> None:
        self.layout()

    @classmethod
    def of(cls, layout: KVLayout) -> KV:
        """The shape of a model's layout."""
        kinds: dict[torch.dtype, Literal["float32", "bfloat16", "float16"]] = {
            torch.float32: "float32",
            torch.bfloat16: "bfloat16",
            torch.float16: "float16",
        }
        return cls(layout.layers, layout.heads, layout.dqk, layout.dv, kinds[layout.dtype], layout.state, layout.times)

    def layout(self) -> KVLayout:
        """The layout, for the cache."""
        dtype = getattr(torch, self.dtype)
        return KVLayout(self.layers, self.heads, self.dqk, self.dv, dtype, self.state, self.times)


class DeviceCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device's costs, in milliseconds and bytes per second.

    step_ms: the worker's own time per step. answer_ms: its further time per answer. cold_ms: additional time of an
    operation after an idle time. lasting_ms: noise this far apart correlates by 1/e.
    """

    source: str  # of the numbers, for a reader of the report
    kv: KV
    prefill_ms: tuple[NotNegative, NotNegative, NotNegative]
    score_ms: tuple[NotNegative, NotNegative, NotNegative]
    extend_factors: Factors = (1.0,)  # quantiles of measured / formula, evenly spaced from the least to the greatest
    score_factors: Factors = (1.0,)
    step_ms: NotNegative = 0.0
    answer_ms: NotNegative = 0.0
    cold_ms: NotNegative = 0.0
    lasting_ms: NotNegative = LASTING_MS
    steps: Positive = 1  # equal steps, such as layers, between which a prefill can be interrupted
    reload_bytes_per_s: Above
    spill_bytes_per_s: Above

    def extend(self, position: int, tokens: int) -> float:
        """Milliseconds, without noise."""
        e0, e1, e2 = self.prefill_ms
        return e0 + e1 * tokens + e2 * tokens * (position + tokens / 2)

    def score(self, batch: Sequence[tuple[int, int]]) -> float:
        """Milliseconds, without noise, of rankings with (prefix tokens, suffix and candidate tokens)."""
        s0, s1, s2 = self.score_ms
        return s0 + sum(s1 * rows + s2 * rows * prefix for prefix, rows in batch)

    def full_ms(self, prefix: int, rows: int) -> float:
        """Milliseconds of full inference in one piece, without noise. rows: suffix and candidates."""
        return self.extend(0, prefix) + self.score([(prefix, rows)])

    def longest_full(self, full_ms: float, rows: int, step: int) -> int:
        """The longest prefix, in whole steps, whose full inference takes at most full_ms; 0 if none does.

        The search ends at MOST_TOKENS.
        """
        low, high = 0, 1
        while high * step < MOST_TOKENS and self.full_ms(high * step, rows) <= full_ms:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.full_ms(middle * step, rows) <= full_ms else (low, middle)
        return low * step

    def dilated(self, factor: float) -> DeviceCosts:
        """The costs of a device that takes `factor` times as long for everything."""
        return msgspec.structs.replace(
            self,
            prefill_ms=_times(self.prefill_ms, factor),
            score_ms=_times(self.score_ms, factor),
            cold_ms=factor * self.cold_ms,
            lasting_ms=factor * self.lasting_ms,
            reload_bytes_per_s=self.reload_bytes_per_s / factor,
            spill_bytes_per_s=self.spill_bytes_per_s / factor,
        )

    def scaled(self, layers: float, width: float) -> DeviceCosts:
        """The costs of a model with so many times the layers and the width, by arithmetic.

        Linear parts take layers · width², attention and the bytes of K and V layers · width, and the launches of an
        operation layers.
        """

        def times(ms: tuple[float, float, float]) -> tuple[float, float, float]:
            return layers * ms[0], layers * width**2 * ms[1], layers * width * ms[2]

        kv = self.kv
        heads = max(1, round(kv.heads * width))
        count = max(1, round(kv.layers * layers))
        return msgspec.structs.replace(
            self,
            prefill_ms=times(self.prefill_ms),
            score_ms=times(self.score_ms),
            steps=max(1, round(self.steps * layers)),
            kv=msgspec.structs.replace(kv, layers=count, heads=heads),
        )

    @classmethod
    def read(cls, path: Path) -> DeviceCosts:
        """Read a TOML file. Raises InputError, which names file and key."""
        try:
            return msgspec.convert(tomllib.loads(read_text(path)), cls)
        except OSError as error:
            raise InputError(f"costs {path}: {error.strerror or error}") from error
        except UnicodeError as error:
            raise InputError(f"costs {path}: not UTF-8 text") from error
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InputError(f"costs {path}: not TOML: {error}") from error
        except msgspec.ValidationError as error:
            raise InputError(
                f"costs {path}: {error}; `--costs calibrate --save-costs FILE` writes an example"
            ) from error

    def as_toml(self) -> str:
        """The costs as TOML, for `read`."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        table = values.pop("kv")
        lines = [f"{name} = {_toml(value)}" for name, value in values.items()]
        return "\n".join([*lines, "", "[kv]", *(f"{name} = {_toml(value)}" for name, value in table.items())]) + "\n"


def _times(ms: tuple[float, float, float], factor: float) -> tuple[float, float, float]:
    return factor * ms[0], factor * ms[1], factor * ms[2]


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()  # a JSON string is a basic string of TOML
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(each) for each in value) + "]"
    return repr(value)
