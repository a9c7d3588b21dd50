"""The shape of a SASRec, and what its prefix KV consist of."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
import torch
from msgspec import Meta, to_builtins

from relaygr_stream.models.kv import KVLayout
from relaygr_stream.models.stu import Layers, Positive
from relaygr_stream.wire.features import FeatureColumn

Form = Literal["recbole", "gsasrec"]
Activation = Literal["gelu", "relu", "swish", "tanh", "sigmoid"]

#: Bytes of a row of the window in the state.
ROW_BYTES: Final = 4


class SasRecConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole definition of a SASRec apart from its weights.

    items: rows of the item table; row 0 stands for no item. hidden: width between W_up and W_down. norm_eps: of every
    LayerNorm. own_output: whether candidates have a table of their own.
    """

    architecture: ClassVar[str] = "sasrec"

    form: Form
    layers: Layers
    dim: Positive
    heads: Positive
    hidden: Positive
    items: Annotated[int, Meta(ge=2, le=2**31 - 1)]
    window: Positive
    activation: Activation
    norm_eps: Annotated[float, Meta(gt=0, le=1)]
    own_output: bool = False
    tasks: tuple[Annotated[str, Meta(min_length=1)]] = ("next_item",)

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"{self.heads} heads do not divide the width {self.dim}")

    @property
    def vocab(self) -> int:
        """Ids below it have a row, as in `HSTUConfig`; here but 0."""
        return self.items

    @property
    def item_table(self) -> tuple[int, int]:
        """The shape of the item table."""
        return self.items, self.dim

    @property
    def oov_rows(self) -> int:
        """No rows are for unknown ids: such an id shares one of the others."""
        return 0

    @property
    def contextual_seq_len(self) -> int:
        """No token sees later ones."""
        return 0

    @property
    def features(self) -> tuple[FeatureColumn, ...]:
        """It reads no features."""
        return ()

    @property
    def grows(self) -> bool:
        """Whether K and V of a behaviour stay the same until the window is full."""
        return self.form == "recbole"

    def layout(self, dtype: torch.dtype) -> KVLayout:
        """K and V of a behaviour, where they stay the same; in the state, the window's rows and the newest x."""
        state, width = self.window * ROW_BYTES // dtype.itemsize + self.dim, self.dim // self.heads
        if not self.grows:
            return KVLayout.of_state(state, dtype)
        return KVLayout(self.layers, self.heads, width, width, dtype, state)

    def fields(self) -> dict[str, Any]:
        """The fields as config.json has them."""
        fields: dict[str, Any] = to_builtins(self)
        return fields
