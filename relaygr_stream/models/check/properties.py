"""The properties of scores, one function each: it returns the model's deviation, or raises Failed with what it saw.

The order puts the most basic property first, since the first failure is the nearest to the cause.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

from relaygr_stream.errors import FactoryError, RelayError
from relaygr_stream.models.api import ScoreInput, Tokens
from relaygr_stream.models.check.probe import CANDIDATES, Failed, Items, Measure, Probe, Scores

#: Limit for one or two histories in half precision. A history's scores share its roundings: 0.80…1.63 over 80 seeds.
FEW_HISTORIES_LIMIT: Final = 2.0
#: Tokens of one `prefill` for the longest prefix: a chunk, as in the worker, far below the whole.
LONG_CHUNK: Final = 1024
#: Of items on the wire.
LARGEST_ID: Final = 2**63 - 1


def contract(probe: Probe) -> Measure | None:
    """Shapes, types and kv.length, which Probe checks in each call, and finite scores."""
    history = probe.history(probe.lengths()[-1])
    region = probe.region(len(history) + 7)
    storage = region.storage
    probe.prefill(region, history)
    if region.storage is not storage:
        raise Failed("prefill() replaced the region's memory; it must write into kv.layer(i) in place")
    scores = probe.score(region, probe.none, probe.candidates(CANDIDATES))
    if not np.isfinite(scores).all():
        raise Failed(f"{int((~np.isfinite(scores)).sum())} of {scores.size} scores are not finite")
    batch = [probe.ranking(region, probe.none, probe.candidates(count)) for count in (1, 5)]
    probe.score_batch(batch)
    return None


def version(probe: Probe) -> Measure | None:
    """Two models of one version score alike; another type is another version."""
    again = probe.make_again()
    history, candidates = probe.history(probe.lengths()[-1]), probe.candidates(CANDIDATES)
    if again.version != probe.model.version:
        raise Failed(f"made twice with the same settings, it is {probe.model.version!r}, then {again.version!r}")
    found, full = probe.full(history, candidates, again), probe.full(history, candidates)
    if not np.allclose(found, full, rtol=1e-4, atol=1e-5 * float(np.abs(full).max())):
        raise Failed(f"made twice with the same settings, both are version {again.version!r} but score differently")
    for other in (torch.float32, torch.bfloat16, torch.float16):
        if other == probe.dtype:
            continue
        try:
            version = probe.make(other).version
        except RelayError as error:
            if isinstance(error, FactoryError):
                cause = error.__cause__
                raise Failed(f"in {other} the factory raised {type(cause).__name__}: {cause}") from error
            continue  # a model need not offer every type, and refuses it by such an error
        except Exception as error:
            raise Failed(f"making the model in {other} raised {type(error).__name__}: {error}") from error
        if version == again.version:
            raise Failed(f"{version!r} is its version in {probe.dtype} and in {other}; their scores differ")
    return None


def determinism(probe: Probe) -> Measure:
    """Repeated calls with another user in between give the same scores."""
    deviations = probe.deviations()
    history, candidates = probe.history(probe.lengths()[-1]), probe.candidates(CANDIDATES)
    region = probe.prefix(history)
    for _ in range(3):
        probe.full(probe.history(probe.lengths()[0]), probe.candidates(3))
        probe.compare(deviations, probe.score(region, probe.none, candidates), history, candidates)
    return deviations.measure


def suffix(probe: Probe) -> Measure:
    """The scores do not depend on where history is cut into prefix and suffix."""
    deviations = probe.deviations()
    for length in probe.lengths()[1:]:
        history, candidates = probe.history(length), probe.candidates(CANDIDATES)
        for cut in sorted({1, length // 2, length - 1}):
            prefix, after = history.slice(0, cut), _suffix(probe, history, cut)
            scores = probe.score(probe.prefix(prefix), after, candidates)
            probe.compare(deviations, scores, prefix, candidates, after)
    return deviations.measure


def candidates_apart(probe: Probe) -> Measure:
    """A candidate's score is the same among others, in another order, and alone, behind a suffix too."""
    deviations = probe.deviations()
    for index, length in enumerate(probe.lengths()):
        history, candidates = probe.history(length), probe.candidates(CANDIDATES)
        region = probe.prefix(history)
        order = probe.random.permutation(CANDIDATES)
        suffixes = [probe.none]
        if probe.takes_suffix and index % 4 == 0:  # some lengths are enough: it takes most of this property's time
            suffixes.append(probe.behaviours(min(5, probe.bounds.suffix)))
        for after in suffixes:
            permuted = np.empty((CANDIDATES, len(probe.model.tasks)), np.float32)
            permuted[order] = probe.score(region, after, candidates[order])
            among_others = probe.score(region, after, np.concatenate([candidates, probe.candidates(9)]))[:CANDIDATES]
            alone = [probe.score(region, after, candidates[at : at + 1]) for at in range(CANDIDATES)]
            expected = _alone(probe, history, after, candidates)
            for found in (permuted, among_others, np.concatenate(alone)):
                deviations.add(found, *expected)
    return deviations.measure


def batch_apart(probe: Probe) -> Measure:
    """A ranking scores in a ragged batch as it does alone, even if its neighbours' memory is all NaN or infinity."""
    deviations = probe.deviations()
    requests = [_request(probe, length, index) for index, length in enumerate(probe.lengths())]
    requests.append((probe.user, probe.none, probe.candidates(CANDIDATES)))  # new users are batched with others
    alone = [_alone(probe, *request) for request in requests]
    for loud in (None, math.nan, math.inf):
        batch: list[ScoreInput] = []
        quiet: list[int] = []
        for index in probe.random.permutation(len(requests)):
            history, after, candidates = requests[index]
            batch.append(probe.ranking(probe.prefix(history, slack=5), after, candidates))
            quiet.append(int(index))
            if loud is not None:
                kv = probe.prefix(probe.history(probe.lengths()[-1]), slack=5)
                kv.storage.fill_(loud)
                batch.append(probe.ranking(kv, after, probe.candidates(3 + int(index))))
                quiet.append(-1)
        for index, scores in zip(quiet, probe.score_batch(batch), strict=True):
            if index >= 0:
                deviations.add(scores, *alone[index])
    return deviations.measure


def edges(probe: Probe) -> Measure:
    """A user without history, one behaviour, one candidate."""
    deviations = probe.deviations()
    candidates = probe.candidates(CANDIDATES)
    user = probe.user
    empty = probe.region(8, math.nan)
    probe.prefill(empty, user)
    scores = probe.score(empty, probe.none, candidates)
    if not np.isfinite(scores).all():
        raise Failed("scores of a user without any history are not finite")
    deviations.add(scores, scores, probe.full(user, candidates, probe.reference))
    for length in (1, 9) if probe.takes_suffix else ():
        after = probe.behaviours(min(length, max(probe.bounds.suffix, 1)))
        probe.compare(deviations, probe.score(empty, after, candidates), user, candidates, after)
    one = user.followed_by(probe.behaviours(1))
    probe.compare(deviations, probe.score(probe.prefix(one, slack=2), probe.none, candidates), one, candidates)
    return deviations.measure


def unknown_items(probe: Probe) -> Measure:
    """Item ids up to the largest of the wire, most of them outside any vocabulary, score finitely and as in full."""
    deviations = probe.deviations(half_limit=FEW_HISTORIES_LIMIT)
    items = np.array(
        (0, probe.bounds.items, probe.bounds.items + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, LARGEST_ID - 1, LARGEST_ID)
    )
    for length in probe.lengths()[-2:]:
        history, candidates = probe.history(length), np.concatenate([items, probe.candidates(3)])
        history.array[0, history.context :] = probe.random.permutation(np.resize(items, length))[history.context :]
        cut = length // 2 if probe.takes_suffix else length
        prefix, after = history.slice(0, cut), _suffix(probe, history, cut)
        scores = probe.score(probe.prefix(prefix), after, candidates)
        if not np.isfinite(scores).all():
            raise Failed(f"{int((~np.isfinite(scores)).sum())} of {scores.size} scores are not finite")
        probe.compare(deviations, scores, prefix, candidates, after)
    return deviations.measure


def longest(probe: Probe) -> Measure:
    """The largest request of the settings (max_prefix_tokens, max_suffix_tokens, max_candidates) scores as in full.

    Also with a stale prefix: the suffix then carries worker.max_stale_tokens of the prefix too.
    """
    deviations = probe.deviations(half_limit=FEW_HISTORIES_LIMIT)
    bounds, incremental = probe.bounds, probe.model.incremental
    longest = probe.schema.context_tokens + bounds.prefix
    total = longest + (bounds.suffix if probe.takes_suffix else 0)
    history, candidates = probe.history(total), probe.candidates(bounds.candidates)
    for length in sorted({longest - bounds.max_stale, longest}) if incremental else (longest,):
        stops = tuple(range(LONG_CHUNK, length, LONG_CHUNK)) if incremental else ()
        prefix, after = history.slice(0, length), history.slice(length, total)
        scores = probe.score(probe.prefix(prefix, stops=stops, slack=len(after)), after, candidates)
        probe.compare(deviations, scores, prefix, candidates, after)
    return deviations.measure


def half_precision(probe: Probe) -> Measure | None:
    """Full inference in half precision is finite, and its deviation from float32 is smaller than the scores."""
    if not probe.half:
        return None
    worst = 0.0
    for length in (*probe.lengths(), min(512, probe.bounds.prefix)):
        history, candidates = probe.history(length), probe.candidates(CANDIDATES)
        found, truth = probe.full(history, candidates), probe.full(history, candidates, probe.reference)
        if not np.isfinite(found).all():
            raise Failed(f"scores behind {length} behaviours are not finite in {probe.dtype}, and are in float32")
        worst = max(worst, float(np.sqrt(((found - truth) ** 2).mean() / (truth**2).mean().clip(1e-30))))
    return Measure(worst, 1.0)


def _suffix(probe: Probe, history: Tokens, start: int) -> Tokens:
    """The history from `start` on, as far as the settings allow for a suffix; one behaviour at least."""
    return history.slice(start, min(len(history), start + max(probe.bounds.suffix, 1)))


def _request(probe: Probe, length: int, index: int) -> tuple[Tokens, Tokens, Items]:
    after = probe.behaviours(min(index, probe.bounds.suffix)) if probe.takes_suffix else probe.none
    return probe.history(length), after, probe.candidates(1 + index * 5)


def _alone(probe: Probe, history: Tokens, after: Tokens, candidates: Items) -> tuple[Scores, Scores]:
    """The scores of one ranking in a batch of one, in the type under check and in float32."""
    own = probe.score(probe.prefix(history), after, candidates)
    if not probe.half:
        return own, own
    return own, probe.score(probe.prefix(history, model=probe.reference), after, candidates, probe.reference)
