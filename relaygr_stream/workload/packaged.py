"""The generated traffic that the packaged model was trained on (checkpoints/demo/README.md)."""

from __future__ import annotations

import json
from typing import Final

from relaygr_stream.settings.files import packaged_dir
from relaygr_stream.settings.load import PACKAGED_MODEL
from relaygr_stream.settings.worker import Model

#: Nearly uniform: were the candidates that popularity finds mostly in the history, they would tell nothing.
ITEM_EXPONENT: Final = 0.25


def is_packaged(model: Model) -> bool:
    """Whether the settings name the packaged model."""
    return model.checkpoint == PACKAGED_MODEL and not model.factory


def packaged_items() -> int:
    """The number of items that the packaged model knows."""
    config = packaged_dir("checkpoints") / PACKAGED_MODEL / "config.json"
    return int(json.loads(config.read_text(encoding="utf-8"))["vocab"])
