"""The property of models that can be interrupted within `extend` (SteppedModel)."""

from __future__ import annotations

from typing import cast

import torch

from relaygr_stream.models.check.measure import Measure
from relaygr_stream.models.check.probe import NO_TOKENS, Failed, Probe
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.protocol import SteppedModel
from relaygr_stream.models.tokens import Tokens

CANDIDATES = 12


def has_steps(probe: Probe) -> bool:
    """Whether the model offers `extend_in_steps`; asked of its class, as the worker does."""
    return hasattr(type(probe.model), "extend_in_steps")


def steps(probe: Probe) -> Measure:
    """With rankings between the steps, of this region and of another; and given up half-way, then done anew."""
    deviations = probe.deviations()
    for length in probe.lengths():
        history, candidates = probe.history(length), probe.candidates(CANDIDATES)
        before = length // 2 if probe.model.incremental else 0
        other = probe.prefix(probe.history(9))
        region = probe.region(length, 0.37)
        if before:
            probe.extend(region, history.slice(0, before))
        known = probe.score(region, NO_TOKENS, candidates) if before else None
        for most in (1, 1 << 30):  # the first time only one step is taken
            _extend(probe, region, history.slice(before, length), most)
            if region.length == length:
                break
            probe.score(other, NO_TOKENS, candidates)
            if known is not None and (probe.score(region, NO_TOKENS, candidates) != known).any():
                raise Failed(f"an extension of {length - before} tokens behind {before}, given up, changed the scores")
        probe.compare(deviations, probe.score(region, NO_TOKENS, candidates), history, candidates)
    return deviations.measure


def _extend(probe: Probe, region: KVRegion, tokens: Tokens, most: int) -> None:
    """At most so many steps, a ranking of another region after each."""
    start, other = region.length, probe.prefix(probe.history(5))
    taken = cast(SteppedModel, probe.model).extend_in_steps(region, tokens)
    for _ in range(most):
        with torch.inference_mode():
            over = next(taken, taken) is taken
        if over:
            break
        if region.length != start:
            raise Failed(f"kv.length moved from {start} to {region.length} before the last step")
        probe.score(other, NO_TOKENS, probe.candidates(3))
    else:
        return
    if region.length != start + len(tokens):
        raise Failed(f"after the last step kv.length is {region.length}, not {start + len(tokens)}")
