"""The file of a worker's DRAM tier, as the settings name it, for prefix KV of this model that are computed this way."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import structlog
import torch

from relaygr_stream.cache.kept import kept_bytes
from relaygr_stream.cache.memory import ALIGNMENT
from relaygr_stream.cache.tier_file import FileShape, TierFile
from relaygr_stream.cache.tier_file_open import open_tier_file
from relaygr_stream.cache.tiers import capacity_for
from relaygr_stream.errors import ConfigError
from relaygr_stream.models.api import ROWS, RankingModel, schema_of
from relaygr_stream.models.loading import BuiltIn
from relaygr_stream.settings.schema import Settings

log = structlog.get_logger(__name__)


def computed_by(model: RankingModel, device: torch.device) -> str:
    """The kind of device and the kernels: with others, the same weights give K and V that differ in their last bits."""
    return f"{device.type}/{model.kernels}" if isinstance(model, BuiltIn) else device.type


def tier_file_of(settings: Settings, model: RankingModel, device: torch.device) -> TierFile | None:
    """The worker's file; None: none is set, or another process has it, which is logged.

    Raises ConfigError, or CapacityError where there is no room for it.
    """
    worker = settings.worker
    if not (worker.dram_path and worker.dram_bytes):
        return None
    if not worker.name:
        raise ConfigError("`worker.dram_path` needs `worker.name`: by it a restarted worker finds its file again")
    path = _path(Path(worker.dram_path), settings.kafka.prefix, worker.name)
    file = open_tier_file(path, _shape(worker.dram_bytes, model, device))
    if file is None:
        log.warning("another process has the DRAM tier's file: this worker's prefix KV end with it", file=str(path))
    return file


def _path(folder: Path, prefix: str, name: str) -> Path:
    """Neither a prefix nor a name has the sign between them. A file of the last release, which had none, is renamed."""
    path = folder / f"relaygr-{prefix}+{name}.dram"
    with suppress(OSError):  # opening the file says what is wrong
        former = folder / f"relaygr-{prefix}{name}.dram"
        if former.exists() and not path.exists():
            former.rename(path)
    return path


def _shape(nbytes: int, model: RankingModel, device: torch.device) -> FileShape:
    layout, token_bytes = model.layout, 8 * (ROWS + schema_of(model).words)
    least = kept_bytes(layout.nbytes(capacity_for(1)), capacity_for(1), token_bytes)
    identity = f"model {model.version}, {layout}, by {computed_by(model, device)}"
    return FileShape(nbytes // ALIGNMENT * ALIGNMENT, -(-least // ALIGNMENT) * ALIGNMENT, token_bytes, identity)
