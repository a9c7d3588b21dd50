"""The properties of models that read features (wire/features.py): each column where it belongs, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice
from typing import Final

import numpy as np

from relaygr_stream.models.api import ROWS, Tokens
from relaygr_stream.models.check.probe import CANDIDATES, KV_LIMIT, Applies, Failed, Items, Measure, Probe, Scores
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.wire.features import FeatureColumn, Table

#: Histories of any length, each with another value of a column, to try: a small table has the same row for many values,
#: a time may matter only before another one, and a count of candidates only behind a short history.
TRIES: Final = 64


def reads(table: Table) -> Applies:
    """Whether a probe's model reads features of this table."""
    return lambda probe: bool(probe.schema.table(table))


def user_changed(probe: Probe) -> Measure:
    """Other features of the user, with the same behaviours and in the same memory, score as in a new model."""
    deviations = probe.deviations()
    for length in probe.lengths()[1:]:
        before, candidates = probe.history(length), probe.candidates(CANDIDATES)
        after = probe.with_user(before)
        new = probe.make_again()
        full = probe.full(after, candidates, new)
        region = probe.prefix(before)
        probe.score(region, probe.none, candidates)
        region.length = 0
        probe.prefill(region, after)
        found = probe.score(region, probe.none, candidates)
        deviations.add(found, full, probe.full(after, candidates, probe.reference) if probe.half else full)
    return deviations.measure


def cross_stay_out(probe: Probe) -> Measure:
    """K/V and state after scoring with some features of candidates are those after scoring with others."""
    deviations = probe.deviations(KV_LIMIT)
    for length in probe.lengths():
        history, candidates = probe.history(length), probe.candidates(CANDIDATES)
        held: list[Scores] = []
        for salt in (1, 2):
            probe.score_batch([probe.ranking(probe.prefix(history), probe.none, candidates, salt)])
            held.append(_held(probe.prefix(history)))
        true = _held(probe.prefix(history, model=probe.reference)) if probe.half else held[0]
        deviations.add(held[1], held[0], true)
    return deviations.measure


def are_read(probe: Probe) -> None:
    """Each column changes some score. Raises Failed, naming the first that does not."""
    for column in probe.schema.columns:
        lengths = islice(cycle(reversed(probe.lengths())), TRIES)
        if not any(_matters(probe, column, length) for length in lengths):
            raise Failed(
                f"another value of the {column.of} column {column.name!r} changed none of {CANDIDATES} scores, in "
                f"{TRIES} histories"
            )


def _matters(probe: Probe, column: FeatureColumn, length: int) -> bool:
    """Whether other values of one column change a score behind a random history."""
    history, candidates = probe.history(length), probe.candidates(CANDIDATES)
    return bool((_with_other(probe, column, history, candidates) != probe.full(history, candidates)).any())


def _with_other(probe: Probe, column: FeatureColumn, history: Tokens, candidates: Items) -> Scores:
    """The scores with random other values of one column."""
    if column.table == "candidate":
        one = probe.ranking(probe.prefix(history), probe.none, candidates)
        salt = int(probe.random.integers(1, 1000))
        others = {column.name: probe.features(candidates, salt)[column.name]}
        return probe.score_batch([replace(one, features={**one.features, **others})])[0]
    other = probe.with_user(probe.behaviours(len(history)))
    array = history.array.copy()
    context = history.context
    rows = slice(0, context) if column.of == "user" else slice(context, None)
    now, new = (Tokens(tokens.array[:, rows]) for tokens in (history, other))
    values = now.features(column.table, probe.schema)
    values[column.name] = new.features(column.table, probe.schema)[column.name]
    array[ROWS:, rows] = 0
    packed = probe.schema.pack(values, {column.table: len(now)})[column.table]
    probe.schema.to_words(column.table, packed, array[ROWS:, rows])
    return probe.full(Tokens(array), candidates)


def _held(region: KVRegion) -> Scores:
    """All K and V of the region's tokens and its state, in float32 on the host."""
    layers = [part[:, : region.length] for layer in range(region.layout.layers) for part in region.layer(layer)]
    return np.concatenate([part.float().cpu().numpy().ravel() for part in (*layers, region.state)])
