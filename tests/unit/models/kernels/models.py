"""Models on the fused kernels, and a recorder for devices that record nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from relaygr_stream.models.api import Tokens
from relaygr_stream.models.hstu_model import HSTUModel
from relaygr_stream.models.kernels.graphs import CudaRecorder, Recorder, Recording
from relaygr_stream.models.kv import KVRegion
from tests.unit.models.kernels.interpreter import HINT
from tests.unit.models.small_models import small_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class NoPool:
    """A recorder whose recordings have no memory of their own."""

    def free(self) -> None:
        """There is nothing to give back."""


class EagerRecorder(NoPool):
    """Replays by running again, on the same inputs at the same addresses, into the same output."""

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        output = torch.full_like(run(), torch.nan)

        def replay() -> None:
            output.copy_(run())

        return Recording(output, replay)


class CountingRecorder:
    """What records on a device, and how often it did."""

    def __init__(self, device: torch.device = DEVICE) -> None:
        self.records = 0
        self._recorder: Recorder = CudaRecorder(device) if device.type == "cuda" else EagerRecorder()

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        self.records += 1
        return self._recorder.record(run)

    def free(self) -> None:
        self._recorder.free()


def fused_model(dtype: torch.dtype = torch.float32, *, recorder: Recorder | None = None, **changes: Any) -> HSTUModel:
    """A small model on the fused kernels; without a recorder, every launch is issued live."""
    pytest.importorskip("triton", reason=HINT)
    from relaygr_stream.models.kernels.fused import FusedStack

    model = small_model(**changes).place(DEVICE, dtype, "torch")
    fused = FusedStack(model.config, dtype)
    model.use(fused, recorder)
    return model


def plain_model(dtype: torch.dtype = torch.float32, **changes: Any) -> HSTUModel:
    return small_model(**changes).place(DEVICE, dtype, "torch")


def region_of(model: HSTUModel, tokens: Tokens, *stops: int) -> KVRegion:
    """The tokens extended up to each stop in turn; NaN behind them."""
    region = KVRegion.new(model.layout, len(tokens) + 3, torch.nan, DEVICE)
    for stop in (*stops, len(tokens)):
        model.prefill(region, tokens.slice(region.length, stop))
    return region
