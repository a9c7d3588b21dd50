"""Decides whether a model runs on the fused kernels: by the settings, the installed software and a check on the device.

A kernel may be wrong on some device, driver or compiler. Before the first request, this module therefore compares the
kernels with the plain path on the device itself. Recorded graphs have their own comparison (graphs.py).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

import structlog
import torch

from relaygr_stream.errors import ModelError
from relaygr_stream.models.hstu import HSTUStack
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.relative import is_relative
from relaygr_stream.models.stu import RankingRows, StackConfig
from relaygr_stream.settings import Kernels

if TYPE_CHECKING:
    from relaygr_stream.models.kernels.fused import FusedStack

log = structlog.get_logger(__name__)

#: float32: largest deviation relative to the largest output. Half precision: RMS deviation from the float32 truth over
#: that of the plain path; 10,000 outputs determine an RMS to 1 %, and common inputs add to that.
FLOAT_LIMIT: Final = 1e-5
HALF_RATIO: Final = 1.1
#: Embedding width, layers and rankings (prefix, suffix, candidates) of the check. No length is a multiple of a block.
#: The first ranking is cut along its columns, the others are not; one has no prefix, one has a single candidate.
CHECK_DIM: Final = 64
CHECK_LAYERS: Final = 2
CHECK_RANKINGS: Final = ((611, 9, 70), (0, 5, 3), (90, 0, 65), (33, 20, 1))


def fused_stack(
    config: StackConfig, device: torch.device, dtype: torch.dtype, kernels: Kernels = "auto"
) -> FusedStack | None:
    """The fused layers for a stack of this shape, or None for the plain path. Logs the choice and its reason.

    kernels: the setting worker.kernels. auto: fused on CUDA if Triton is installed and passes the check. Raises
    ModelError if it is "triton" and the fused layers are not available.
    """
    if kernels not in ("auto", "triton") or (kernels == "auto" and device.type != "cuda"):
        return None
    fused, problem = _make(config, device, dtype)
    if fused is None:
        if kernels == "triton":
            raise ModelError(f'worker.kernels = "triton", but {problem}; set it to "auto" or "torch"')
        log.warning("attention runs on plain torch operators", reason=problem)
        return None
    log.info("attention runs on fused Triton kernels, which agree with torch operators on this device")
    return fused


def _make(config: StackConfig, device: torch.device, dtype: torch.dtype) -> tuple[FusedStack | None, str]:
    if device.type != "cuda":
        return None, f"the device is {device}: fused kernels are for cuda"
    if config.contextual_seq_len:
        return None, f"the model has contextual_seq_len = {config.contextual_seq_len}, which they do not cover"
    if is_relative(config):
        return None, "the model has a bias on relative positions or times, which they do not cover"
    try:
        module = importlib.import_module("relaygr_stream.models.kernels.fused")
    except ImportError as error:
        return None, f"triton cannot be imported ({error}); CUDA builds of torch bring it, else install triton"
    fused: FusedStack = module.FusedStack(config, dtype)
    problem = disagreement(fused, config, device, dtype)
    return (None, problem) if problem else (fused, "")


def disagreement(fused: FusedStack, config: StackConfig, device: torch.device, dtype: torch.dtype) -> str:
    """In words, how the fused layers differ from the plain path on this device beyond the bound; "" if they agree.

    It compiles all kernels that will run: they depend on the model's shape, not on the sizes of a request.
    """
    try:
        stack = _random_stack(config, device)
        truth = _outputs(stack, torch.float32)
        if dtype == torch.float32:
            stack.fused = fused
            found = _outputs(stack, dtype)
            deviation = float((found - truth).abs().max() / truth.abs().max())
            # The comparison is false for NaN.
            return "" if deviation <= FLOAT_LIMIT else f"its kernels deviate by {deviation:.1e} from torch operators"
        stack.to(dtype)
        plain = _rms(_outputs(stack, dtype).float() - truth)
        stack.fused = fused
        error = _rms(_outputs(stack, dtype).float() - truth)
    except Exception as error_:  # compilers and drivers may raise any exception; the plain path still serves
        return f"its kernels fail here: {type(error_).__name__}: {error_}"
    if error <= HALF_RATIO * plain:
        return ""
    return f"its kernels are {error:.1e} (rms) from the float32 outputs, torch operators in {dtype} {plain:.1e}"


def _random_stack(config: StackConfig, device: torch.device) -> HSTUStack:
    """A small float32 stack with the attention of `config`."""
    small = StackConfig(
        CHECK_LAYERS, CHECK_DIM, config.heads, config.dqk, config.dv, config.scale_tokens,
        max_attn_len=config.max_attn_len, group_norm=config.group_norm,
    )  # fmt: skip
    stack, random = HSTUStack(small), torch.Generator().manual_seed(0)
    for weight in stack.parameters():
        weight.copy_(torch.randn(weight.shape, generator=random) * weight.shape[0] ** -0.5)
    return stack.to(device)


def _outputs(stack: HSTUStack, dtype: torch.dtype) -> torch.Tensor:
    """The stack's outputs for the check's rankings, on the host. Their prefixes are prefilled in two chunks."""
    device, random = next(stack.parameters()).device, torch.Generator().manual_seed(1)
    layout = stack.config.layout(dtype)
    batch = []
    for prefix, suffix, candidates in CHECK_RANKINGS:
        region = KVRegion.new(layout, prefix + 7, torch.nan, device)  # reading behind the tokens shows in the outputs
        x = torch.randn((prefix, CHECK_DIM), generator=random).to(device, dtype)
        for part in torch.tensor_split(x, 2):
            stack.append(region, part)
        batch.append(RankingRows(region, suffix, candidates))
    rows = sum(one.suffix + one.candidates for one in batch)
    return stack.score(batch, torch.randn((rows, CHECK_DIM), generator=random).to(device, dtype)).cpu()


def _rms(errors: torch.Tensor) -> float:
    return float(errors.square().mean().sqrt())
