"""The rows of a model's item table for the ids of a log: one mapping for all that sends a log's items to a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from relaygr_stream.errors import ConfigError, InputError
from relaygr_stream.models.loading import checkpoint_folder, read_config
from relaygr_stream.settings.inputs import read_text
from relaygr_stream.settings.worker import Model
from relaygr_stream.workload.columns import MAX_BROKEN_SHARE
from relaygr_stream.workload.logs import InteractionLog, read_log

#: The file that a training run of examples/ leaves beside its checkpoint: a list of the log's item ids, one a row.
ITEMS_FILE: Final = "items.json"
#: Its bound: 20 million ids of ten characters.
MAX_ITEMS_BYTES: Final = 1 << 28


def read_log_for(path: str | Path, model: Model, **how: Any) -> InteractionLog:
    """`read_log` of a log whose items a model ranks, with its items as rows of the model's table (`in_rows_of`).

    how: as for `read_log`. Where the checkpoint lists ids, they are read as text, as in its training.
    """
    if item_names(model) is not None and how.get("item_ids", "auto") == "auto":
        how["item_ids"] = "name"
    return in_rows_of(read_log(path, **how), model)


def in_rows_of(log: InteractionLog, model: Model) -> InteractionLog:
    """The log with its items as rows of the model's table: by the checkpoint's items.json, or as they are.

    Interactions with items without a row are left out, and the log's `note` counts them. Without a checkpoint, and with
    one that has rows for unknown items, ids stay as they are. Raises InputError, with an example, if more than
    MAX_BROKEN_SHARE of the interactions have none.
    """
    if model.factory or not model.checkpoint:
        return log
    names, folder = item_names(model), checkpoint_folder(model.checkpoint)
    if not folder.is_dir():
        return replace(log, note=f"ids are sent as they are: {model.checkpoint}, which may list them, is not here")
    if names is None:
        config = read_config(folder)
        rows, unknown = log.items.astype(np.int64), log.items >= (2**32 if config.oov_rows else config.vocab)
        wanted = f"{model.checkpoint} knows the ids 0 to {config.vocab - 1}"
    else:
        found, places = np.unique(log.items, return_inverse=True)
        of_name = {name: row for row, name in enumerate(names)}
        rows = np.array([of_name.get(_name(log, item), -1) for item in found.tolist()], np.int64)[places]
        unknown = rows < 0
        wanted = f"{ITEMS_FILE} in {model.checkpoint} lists {len(names)} others"
    if not unknown.any():
        return replace(log, items=rows.astype(np.uint32), item_names=())
    example, items = _name(log, int(log.items[unknown][0])), len(np.unique(log.items[unknown]))
    lost = f"the model has no row for {items} of its items, {example!r} among them; {wanted}"
    if np.mean(unknown) > MAX_BROKEN_SHARE:
        raise InputError(f"{log.path}: {lost}. Train a checkpoint on this file, or leave these items out")
    note = f"{int(unknown.sum())} interactions are left out: {lost}"
    return replace(_only(log, ~unknown, rows), note=note)


def _only(log: InteractionLog, keep: Any, rows: Any) -> InteractionLog:
    owners = np.repeat(np.arange(len(log.users)), np.diff(log.offsets))[keep]
    present, counts = np.unique(owners, return_counts=True)
    return replace(
        log,
        users=tuple(log.users[code] for code in present.tolist()),
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        items=rows[keep].astype(np.uint32),
        actions=log.actions[keep],
        times=log.times[keep],
        features={name: values[keep] for name, values in log.features.items()},
        item_names=(),
    )


def item_names(model: Model) -> list[str] | None:
    """The item ids of the log that the checkpoint was trained on, by row; None: the rows are the ids.

    Raises ConfigError for a file that cannot be read.
    """
    if model.factory or not model.checkpoint:
        return None
    file = checkpoint_folder(model.checkpoint) / ITEMS_FILE
    if not file.exists():
        return None
    try:
        return msgspec.convert(msgspec.json.decode(read_text(file, MAX_ITEMS_BYTES)), list[str], strict=False)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read as a list of item ids: {error}") from error


def _name(log: InteractionLog, item: int) -> str:
    """The item's id in the file."""
    return log.item_names[item - 1] if log.item_names else str(item)
