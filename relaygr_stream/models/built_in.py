"""What the built-in model families share: an embedding of items, weights that are loaded once, and their version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Final, Protocol, Self

import torch
from torch import nn

from relaygr_stream.models.api import Tokens, digest, version_of
from relaygr_stream.models.hstu import HSTUStack
from relaygr_stream.models.kv import KVLayout, KVRegion
from relaygr_stream.models.mapped import ItemEmbedding
from relaygr_stream.settings import Kernels
from relaygr_stream.wire.features import NO_FEATURES, FeatureSchema

#: The types that the kernels support and the settings offer.
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class FamilyConfig(Protocol):
    """The whole definition of a model apart from its weights."""

    architecture: ClassVar[str]

    @property
    def tasks(self) -> tuple[str, ...]: ...  # noqa: D102
    def fields(self) -> dict[str, Any]: ...  # noqa: D102
    def layout(self, dtype: torch.dtype) -> KVLayout: ...  # noqa: D102


class BuiltInModel(nn.Module, ABC):
    """A `RankingModel` of one family, without weights until `load_weights`; `place` moves and converts them."""

    incremental: bool
    config: FamilyConfig
    embedding: ItemEmbedding

    def __init__(self, config: FamilyConfig, embedding: ItemEmbedding, features: FeatureSchema = NO_FEATURES) -> None:
        super().__init__()
        self.config, self.embedding, self.features = config, embedding, features
        self.layout = config.layout(torch.float32)
        self.tasks = config.tasks
        self.version = self.note = self._digest = ""

    @property
    def unknown_items(self) -> int:
        """As of the embedding."""
        return self.embedding.unknown_items

    @property
    @abstractmethod
    def kernels(self) -> str:
        """What computes the layers: "triton", an object of native/objects.py, or "torch"."""

    @abstractmethod
    def place(self, device: torch.device, dtype: torch.dtype, kernels: Kernels = "auto") -> Self:
        """Move to `device`, convert to `dtype` (a head may stay float32), and set layout and version.

        kernels: as the setting worker.kernels. Raises ModelError if it names kernels that cannot be used, ValueError
        for a dtype outside DTYPES.
        """

    def load_weights(self, weights: dict[str, torch.Tensor], note: str) -> Self:
        """Load float32 weights with exactly the keys and shapes of `state_dict()`; the version is their digest."""
        self.load_state_dict(weights)
        self.note = note
        self._digest = digest(self.config.fields() | self._files(), self.state_dict())
        return self.place(torch.device("cpu"), torch.float32)

    def _files(self) -> dict[str, str]:
        """Digests of files beside the weights, which scores depend on, too."""
        return {} if self.embedding.table is None else {"table": self.embedding.table.digest}

    def _place_embedding(self, device: torch.device, dtype: torch.dtype) -> None:
        """The part of `place` that is the same for all."""
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}; got {dtype}")
        self.embedding.to(device=device, dtype=dtype)
        if self.embedding.table is not None:
            self.embedding.table.place(device, dtype)
        self.layout = self.config.layout(dtype)
        self.version = version_of(self.config.architecture, self._digest, dtype, self.features)


class StackedModel(BuiltInModel):
    """A model of HSTU layers, which can be computed one by one."""

    stack: HSTUStack

    @property
    def kernels(self) -> str:
        """As of the stack."""
        return self.stack.kernels

    def warm_up(self, most: int) -> None:
        """Do the one-time work of the first prefill or ranking of each size, up to `most` rows."""
        self.stack.warm_up(most)

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        """Append the K/V of `tokens`, at positions from kv.length on. Raises as `HSTUStack.append`, and ModelError for
        tokens behind others if the model is not incremental."""
        for _ in self._steps(kv, tokens):
            pass

    def prefill_in_steps(self, kv: KVRegion, tokens: Tokens) -> Iterator[None]:
        """As `prefill`, one layer per step; short ones that are recorded (kernels/recorded.py) in one step."""
        return self._steps(kv, tokens)

    @abstractmethod
    def _steps(self, kv: KVRegion, tokens: Tokens) -> Iterator[None]:
        """What both ways do: a subclass may have either call the other."""
