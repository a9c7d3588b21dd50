"""The rows of a model's tables for the items and actions of a log: one mapping for all that sends a log to a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from relaygr_stream.errors import InputError, ModelError
from relaygr_stream.models.hstu_model import HSTUConfig
from relaygr_stream.models.item_ids import ITEMS_FILE, listed_items
from relaygr_stream.models.loading import checkpoint_folder, read_config
from relaygr_stream.settings.worker import Model
from relaygr_stream.workload.columns import MAX_BROKEN_SHARE, narrowed
from relaygr_stream.workload.logs import InteractionLog, read_log


@dataclass(frozen=True)
class ModelRows:
    """What a checkpoint knows of the log that it was trained on."""

    checkpoint: str
    vocab: int  # items with a row of their own
    takes_all: bool  # whether there are rows for other items
    items: list[str] | None  # the log's item ids, by row; None: the rows are the ids
    actions: tuple[str, ...]  # the log's actions, by row, "" for none; empty: the rows are the log's numbers


def rows_of(model: Model) -> ModelRows | None:
    """The rows of the checkpoint that the settings name; None if they name none.

    Raises ModelError for a checkpoint that is not here or cannot be read, ConfigError for its ITEMS_FILE.
    """
    if model.factory or not model.checkpoint:
        return None
    folder = checkpoint_folder(model.checkpoint)
    if not folder.is_dir():
        raise ModelError(
            f"model.checkpoint = {model.checkpoint}: no such folder here; it says which rows a log's items have. Copy "
            f'its config.json and {ITEMS_FILE}, or send ids as they are with --set model.checkpoint=""'
        )
    config = read_config(folder)
    actions = config.actions if isinstance(config, HSTUConfig) else ()
    own = isinstance(config, HSTUConfig) and config.listed_items  # the model finds the rows
    items = None if own else listed_items(folder)
    return ModelRows(model.checkpoint, config.vocab, bool(config.oov_rows), items, actions)


def read_log_for(path: str | Path, model: Model, **how: Any) -> InteractionLog:
    """`read_log` of a log that a model ranks, with items and actions as rows of the model's tables (`in_rows`).

    how: as for `read_log`. Where the checkpoint lists ids, they are read as text, as in its training.
    """
    rows = rows_of(model)
    if rows is not None and rows.items is not None and how.get("item_ids", "auto") == "auto":
        how["item_ids"] = "name"
    log = read_log(path, **how)
    return log if rows is None else in_rows(log, rows)


def in_rows(log: InteractionLog, rows: ModelRows) -> InteractionLog:
    """The log with its items and actions as rows of the model's tables; its `note` counts those without a row.

    Interactions with items without a row are left out; actions without one are sent as row 0, no action. Raises
    InputError, with an example, if more than MAX_BROKEN_SHARE of the interactions have such items.
    """
    return _with_actions(_with_items(log, rows), rows)


def _with_items(log: InteractionLog, rows: ModelRows) -> InteractionLog:
    if rows.items is None:
        if log.item_names:
            anew = f"its items are names, numbered anew: {rows.checkpoint} has no {ITEMS_FILE} that tells their rows"
            log = _noted(log, anew)
        found = log.items.astype(np.int64)
        unknown = np.zeros(len(log), np.bool_) if rows.takes_all else found >= rows.vocab
        wanted = f"{rows.checkpoint} knows the ids 0 to {rows.vocab - 1}"
    else:
        of_name = {name: row for row, name in enumerate(rows.items)}
        ids, places = np.unique(log.items, return_inverse=True)
        found = np.array([of_name.get(_name(log, item), -1) for item in ids.tolist()], np.int64)[places]
        unknown = found < 0
        wanted = f"{ITEMS_FILE} in {rows.checkpoint} lists {len(rows.items)} others"
    mapped = replace(log, items=narrowed(found), item_names=log.item_names if rows.items is None else ())
    if not unknown.any():
        return mapped
    example, items = _name(log, int(log.items[unknown][0])), len(np.unique(log.items[unknown]))
    lost = f"the model has no row for {items} of its items, {example!r} among them; {wanted}"
    if np.mean(unknown) > MAX_BROKEN_SHARE:
        raise InputError(f"{log.path}: {lost}. Train a checkpoint on this file, or leave these items out")
    return _noted(_only(mapped, ~unknown), f"{int(unknown.sum())} interactions are left out: {lost}")


def _with_actions(log: InteractionLog, rows: ModelRows) -> InteractionLog:
    if not rows.actions:
        anew = f"its actions are names, numbered anew: {rows.checkpoint} does not tell their rows (`actions`)"
        return _noted(log, anew) if log.action_names else log
    of_name = {name: row for row, name in enumerate(rows.actions) if name}
    texts = log.action_texts()
    mapped = np.array([of_name.get(text, 0) for text in texts], np.uint8)[log.actions]
    served = replace(log, actions=mapped, action_names=(), halves=False)
    lost = [text for text in texts if text and text not in of_name]
    if not lost:
        return served
    known = ", ".join(map(repr, of_name)) or "none"
    count = int(np.isin(log.actions, [texts.index(text) for text in lost]).sum())
    return _noted(
        served,
        f"{count} interactions are sent without their action: the model has no row for {len(lost)} actions, "
        f"{lost[0]!r} among them; it was trained with {known}",
    )


def _noted(log: InteractionLog, note: str) -> InteractionLog:
    return replace(log, note="; ".join(filter(None, (log.note, note))))


def _only(log: InteractionLog, keep: npt.NDArray[np.bool_]) -> InteractionLog:
    owners = np.repeat(np.arange(len(log.users)), np.diff(log.offsets))[keep]
    present, counts = np.unique(owners, return_counts=True)
    return replace(
        log,
        users=tuple(log.users[code] for code in present.tolist()),
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        items=log.items[keep],
        actions=log.actions[keep],
        times=log.times[keep],
        features={name: values[keep] for name, values in log.features.items()},
    )


def _name(log: InteractionLog, item: int) -> str:
    """The item's id in the file."""
    return log.item_names[item - 1] if log.item_names else str(item)
