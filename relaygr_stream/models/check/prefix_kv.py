"""The properties of prefix KV: what `prefill` writes, and what it must leave alone.

Each function returns the model's deviation, or raises Failed with what it saw.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import cast

import torch

from relaygr_stream.models.api import SteppedModel, Tokens
from relaygr_stream.models.check.probe import (
    CANDIDATES,
    KV_LIMIT,
    Deviations,
    Failed,
    Measure,
    Probe,
    Scores,
    as_failure,
    model_call,
)
from relaygr_stream.models.kv import KVRegion


def has_tokens(probe: Probe) -> bool:
    """Whether the model's prefix KV consist of K and V per token, at least in part."""
    return probe.model.layout.elements_per_token > 0


def reads_to_length(probe: Probe) -> Measure:
    """Memory behind kv.length does not matter: here it holds NaN, then large numbers."""
    deviations = probe.deviations()
    for length in probe.lengths():
        history, candidates = probe.history(length), probe.candidates(CANDIDATES)
        expected = probe.expected(history, candidates)
        for poison in (math.nan, 1e4):
            region = probe.region(length + 19, poison)
            probe.prefill(region, history)
            deviations.add(probe.score(region, probe.none, candidates), *expected)
    return deviations.measure


def score_reads_only(probe: Probe) -> None:
    """score() changes no bit of the region, its unused part included, and not kv.length."""
    for length in probe.lengths():
        region = probe.region(length + 19, 0.37)  # a model is unlikely to write this number
        probe.prefill(region, probe.history(length))
        before = region.storage.clone()
        suffix = probe.behaviours(5) if probe.takes_suffix else probe.none
        probe.score(region, suffix, probe.candidates(CANDIDATES))
        if region.length != length:
            raise Failed(f"score() left kv.length at {region.length}, it was {length}")
        changed = _changed(region, before, region.capacity) or _changed_state(region, before)
        if changed:
            raise Failed(f"score() of {length} tokens and {len(suffix)} in the suffix wrote to the region: {changed}")


def appends_only(probe: Probe) -> None:
    """prefill() changes no bit of earlier tokens' K/V, which other requests may read meanwhile."""
    for length, longer in pairwise(probe.lengths()):
        history = probe.history(longer)
        region = probe.region(longer)
        probe.prefill(region, history.slice(0, length))
        before = region.storage.clone()
        probe.prefill(region, history.slice(length, longer))
        changed = _changed(region, before, length)
        if changed:
            raise Failed(
                f"prefill() of {longer - length} tokens behind {length} changed K/V of earlier ones: {changed}"
            )


def causal(probe: Probe) -> Measure:
    """K/V of the first tokens do not depend on the tokens that follow in the same call."""
    deviations = probe.deviations(KV_LIMIT)
    for length, longer in pairwise(probe.lengths()):
        history = probe.history(longer)
        whole, part = probe.prefix(history), probe.prefix(history.slice(0, length))
        truth = probe.prefix(history.slice(0, length), model=probe.reference) if probe.half else part
        for found, full, true in zip(*(_held(region, length) for region in (whole, part, truth)), strict=True):
            deviations.add(found, full, true)
    return deviations.measure


def chunks(probe: Probe) -> Measure:
    """Prefill in chunks gives the scores of prefill at once."""
    deviations = probe.deviations()
    for length in probe.lengths():
        for _ in range(3):
            stops = sorted(int(stop) for stop in probe.random.integers(0, length + 1, 4))
            history, candidates = probe.history(length), probe.candidates(CANDIDATES)
            region = probe.prefix(history, stops=tuple(stops))
            probe.compare(deviations, probe.score(region, probe.none, candidates), history, candidates)
    return deviations.measure


def relocation(probe: Probe) -> Measure:
    """The model keeps no state outside the region: spill it, reuse its memory, reload it elsewhere, score."""
    deviations = probe.deviations()
    for length in probe.lengths():
        history, candidates = probe.history(length), probe.candidates(CANDIDATES)
        region = probe.prefix(history, slack=3)
        spilled = region.storage.to("cpu", copy=True)
        region.length = 0
        probe.prefill(region, probe.history(length))
        reloaded = probe.region(length + 3)
        reloaded.storage.copy_(spilled)
        reloaded.length = length
        probe.compare(deviations, probe.score(reloaded, probe.none, candidates), history, candidates)
    return deviations.measure


def extension(probe: Probe) -> Measure:
    """A prefix that was scored, then grown in place or moved into a larger region, scores as the longer prefix."""
    deviations = probe.deviations()
    for most, move in ((1, False), (13, False), (40, True)):
        added = min(most, probe.bounds.prefix - 1)
        for length in probe.lengths(added):
            history, candidates = probe.history(length + added), probe.candidates(CANDIDATES)
            region = probe.prefix(history.slice(0, length), slack=added)
            probe.score(region, probe.none, candidates)
            if move:
                region = _moved(probe, region, length + added + 7)
            probe.prefill(region, history.slice(length, length + added))
            probe.compare(deviations, probe.score(region, probe.none, candidates), history, candidates)
    return deviations.measure


def has_steps(probe: Probe) -> bool:
    """Whether the model's class offers `prefill_in_steps`; the worker looks at the class too."""
    return hasattr(type(probe.model), "prefill_in_steps")


def steps(probe: Probe) -> Measure:
    """`prefill_in_steps` equals `prefill`, with rankings and steps of another user's prefill between its steps.

    Also after an attempt that was abandoned half-way.
    """
    deviations = probe.deviations()
    for length in probe.lengths():
        history, candidates = probe.history(length), probe.candidates(CANDIDATES)
        before = length // 2 if probe.model.incremental else 0
        other = probe.prefix(probe.history(9))
        region = probe.region(length, 0.37)
        if before:
            probe.prefill(region, history.slice(0, before))
        known = probe.score(region, probe.none, candidates) if before else None
        for most in (1, 1 << 30):  # the first attempt stops after one step
            _prefill(probe, region, history.slice(before, length), most, deviations)
            if region.length == length:
                break
            probe.score(other, probe.none, candidates)
            if known is not None and (probe.score(region, probe.none, candidates) != known).any():
                raise Failed(f"a prefill of {length - before} tokens behind {before}, abandoned, changed the scores")
        probe.compare(deviations, probe.score(region, probe.none, candidates), history, candidates)
    return deviations.measure


def _prefill(probe: Probe, region: KVRegion, tokens: Tokens, most: int, deviations: Deviations) -> None:
    """Run at most `most` steps. After each, a step of another user's prefill and a ranking of a third region.

    `deviations` get the scores behind the other user's prefix, if the prefill was not abandoned.
    """
    history, candidates = probe.history(min(9, probe.bounds.prefix)), probe.candidates(CANDIDATES)
    ranked, other = probe.prefix(probe.history(5)), probe.region(len(history), 0.37)
    run, neighbour = _Steps(probe, region, tokens), _Steps(probe, other, history)
    for _ in range(most):
        run.step()
        if run.completed:
            break
        if not neighbour.completed:
            neighbour.step()
        probe.score(ranked, probe.none, probe.candidates(3))
    else:
        return
    while not neighbour.completed:
        neighbour.step()
    probe.compare(deviations, probe.score(other, probe.none, candidates), history, candidates)


class _Steps:
    """A `prefill_in_steps`, one step after the other."""

    def __init__(self, probe: Probe, region: KVRegion, tokens: Tokens) -> None:
        self.completed = False
        self._region = region
        self._tokens = tokens
        self._start = region.length
        self._call = f"prefill_in_steps() of {len(tokens)} tokens behind {region.length}"
        with as_failure(self._call):
            self._rest = cast(SteppedModel, probe.model).prefill_in_steps(region, tokens)

    def step(self) -> None:
        """Raises Failed if the model raises, or kv.length is not what it must be behind this step."""
        start, count, region = self._start, len(self._tokens), self._region
        with model_call(self._call, self._tokens.array):
            self.completed = next(self._rest, self) is self
        if not self.completed and region.length != start:
            raise Failed(f"kv.length moved from {start} to {region.length} before the last step")
        if self.completed and region.length != start + count:
            raise Failed(f"after the last step kv.length is {region.length}, not {start + count}")


def _changed(region: KVRegion, before: torch.Tensor, length: int) -> str:
    """The first place where the first `length` tokens' bits differ from `before`, in words; "" if there is none."""
    old = KVRegion(region.layout, before, region.capacity)
    if region.layout.times and not torch.equal(region.times(0, length), old.times(0, length)):
        return "the times of tokens"
    for layer in range(region.layout.layers):
        for name, now, then in zip(("K", "V"), region.layer(layer), old.layer(layer), strict=True):
            # Compared as bytes, since NaN is unequal to itself.
            differs = now[:, :length].contiguous().view(torch.uint8) != then[:, :length].contiguous().view(torch.uint8)
            if bool(differs.any()):
                token = int(differs.any(2).any(0).nonzero()[0])
                return f"{name} of layer {layer}, first at token {token}"
    return ""


def _changed_state(region: KVRegion, before: torch.Tensor) -> str:
    """Whether the state's bits differ from `before`, in words; "" if they do not."""
    old = KVRegion(region.layout, before, region.capacity)
    return "" if torch.equal(region.state.view(torch.uint8), old.state.view(torch.uint8)) else "its state"


def _held(region: KVRegion, length: int) -> list[Scores]:
    """K and V of the first `length` tokens of each layer, in float32 on the host."""
    parts = [part for layer in range(region.layout.layers) for part in region.layer(layer)]
    return [part[:, :length].float().cpu().numpy() for part in parts]


def _moved(probe: Probe, region: KVRegion, capacity: int) -> KVRegion:
    """The region's tokens in a region of another capacity, as the cache moves an entry that outgrew its region."""
    moved = probe.region(capacity)
    moved.copy_from(region, region.length)
    moved.length = region.length
    region.storage.zero_()
    return moved
