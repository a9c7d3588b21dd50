"""Fused kernels serve only where they are wanted, there, and right."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import msgspec
import pytest
import structlog
import torch

from relaygr_stream import settings
from relaygr_stream.errors import ModelError
from relaygr_stream.models.kernels import choice
from relaygr_stream.models.kernels.choice import disagreement, fused_stack
from relaygr_stream.models.loading import load_model
from relaygr_stream.models.stu import StackConfig
from tests.unit.models.kernels.interpreter import HINT
from tests.unit.models.kernels.models import DEVICE

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
CONFIG = StackConfig(layers=1, dim=16, heads=1, dqk=8, dv=8, scale_tokens=32)
#: In Triton's interpreter each takes half a second of a core.
HALVES = [pytest.param(dtype, marks=pytest.mark.stack) for dtype in (torch.bfloat16, torch.float16)]
DTYPES = [torch.float32, *HALVES]


@pytest.fixture
def _few_rankings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check with less to compute: on a GPU all of it is milliseconds, in the interpreter seconds."""
    monkeypatch.setattr(choice, "CHECK_RANKINGS", ((270, 2, 9), (0, 5, 3)))


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_other_devices_keep_torch_without_a_word(kernels: Any) -> None:
    with structlog.testing.capture_logs() as logged:
        assert fused_stack(CONFIG, CPU, torch.float32, kernels) is None
    assert logged == []


def test_triton_that_cannot_be_had_is_refused_with_its_remedy() -> None:
    with pytest.raises(ModelError, match=r'worker.kernels = "triton", but the device is cpu.*"auto" or "torch"'):
        load_model(settings.Model(), settings.Relay(), device=CPU, dtype=torch.float32, kernels="triton")


def test_contextual_models_keep_torch() -> None:
    with structlog.testing.capture_logs() as logged:
        assert fused_stack(msgspec.structs.replace(CONFIG, contextual_seq_len=3), CUDA, torch.float32) is None
    assert "contextual_seq_len = 3" in logged[0]["reason"]


def test_without_triton_torch_serves_and_the_log_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "relaygr_stream.models.kernels.fused", raising=False)
    monkeypatch.delitem(sys.modules, "relaygr_stream.models.kernels.silu_attention", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with structlog.testing.capture_logs() as logged:
        assert fused_stack(CONFIG, CUDA, torch.float32) is None
    assert "triton cannot be imported" in logged[0]["reason"]


@pytest.mark.usefixtures("_few_rankings")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, pytest.param(100, marks=pytest.mark.stack)])
def test_the_check_finds_that_the_kernels_agree(dtype: torch.dtype, window: int) -> None:
    config = msgspec.structs.replace(CONFIG, max_attn_len=window)
    assert disagreement(_fused(config, dtype), config, DEVICE, dtype) == ""


@pytest.mark.usefixtures("_few_rankings")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "wrong",
    [{"window": 100}, *(pytest.param(one, marks=pytest.mark.stack) for one in ({"scale": 0.4}, {"weight": 1 / 16}))],
)
def test_the_check_finds_kernels_that_do_not(dtype: torch.dtype, wrong: dict[str, Any]) -> None:
    fused = _fused(CONFIG, dtype)
    fused.shape = dataclasses.replace(fused.shape, **wrong)
    assert "its kernels" in disagreement(fused, CONFIG, DEVICE, dtype)


def test_a_check_that_fails_is_a_disagreement() -> None:
    fused = _fused(CONFIG, torch.float32)

    def explode(*_: object) -> torch.Tensor:
        raise RuntimeError("PassManager::run failed")

    fused.prefill_in_steps = explode
    assert disagreement(fused, CONFIG, DEVICE, torch.float32) == (
        "its kernels fail here: RuntimeError: PassManager::run failed"
    )


def _fused(config: StackConfig, dtype: torch.dtype) -> Any:
    pytest.importorskip("triton", reason=HINT)
    from relaygr_stream.models.kernels.fused import FusedStack

    return FusedStack(config, dtype)
