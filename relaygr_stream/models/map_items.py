"""Writes a checkpoint anew with its item table in shards that a worker maps (mapped.py), in full or fewer bits."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal

import msgspec
import torch

from relaygr_stream.errors import ModelError
from relaygr_stream.models.importer.names import check_new, writing
from relaygr_stream.models.item_ids import ITEMS_FILE
from relaygr_stream.models.loading import CONFIG_FILE, WEIGHTS_FILE, read_config, read_weights, save_weights
from relaygr_stream.models.mapped import TYPES, shard_name

TableDtype = Literal["float32", "float16", "bfloat16", "int8"]

ITEM_TABLE: Final = "embedding.item"
#: Rows in memory at a time.
CHUNK: Final = 1 << 16
#: Bytes before the rows: the header, padded.
HEADER_BYTES: Final = 1024
_CODES: Final = {dtype: code for code, (dtype, _) in TYPES.items()}
_MOST: Final = 127


@dataclass
class Mapped:
    """What was written. error: the largest difference of a value; share: of its row's largest value."""

    rows: int = 0
    nbytes: int = 0
    error: float = 0.0
    share: float = 0.0
    shards: int = 0


def map_items(source: Path, out: Path, dtype: TableDtype, shard_bytes: int) -> Mapped:
    """Write the checkpoint `source` to `out`, a new folder. Raises ModelError for one that is none, or has no finite
    values in `dtype`."""
    check_new(out)
    read_config(source)
    weights = read_weights(source / WEIGHTS_FILE)
    if ITEM_TABLE not in weights or weights[ITEM_TABLE].ndim != 2:
        raise ModelError(f"{source / WEIGHTS_FILE}: has no table `{ITEM_TABLE}`; is it in shards already?")
    table, wanted = weights.pop(ITEM_TABLE), getattr(torch, dtype)
    with writing(out):
        done = _write_shards(table, out, wanted, shard_bytes)
        for name in (CONFIG_FILE, ITEMS_FILE):
            if (source / name).is_file():
                shutil.copyfile(source / name, out / name)
        save_weights({name: value.contiguous() for name, value in weights.items()}, out / WEIGHTS_FILE)
    return done


def _write_shards(table: torch.Tensor, out: Path, dtype: torch.dtype, shard_bytes: int) -> Mapped:
    each = max(1, shard_bytes // (table.shape[1] * dtype.itemsize))
    parts = torch.split(table, each)
    done = Mapped(rows=len(table), shards=len(parts))
    for number, part in enumerate(parts):
        with (out / shard_name(number, len(parts))).open("wb") as file:
            _write_shard(file, part, dtype, done)
            done.nbytes += file.tell()
    return done


def _write_shard(file: IO[bytes], rows: torch.Tensor, dtype: torch.dtype, done: Mapped) -> None:
    state, scales, largest = hashlib.blake2b(digest_size=8), list[torch.Tensor](), 0.0
    file.write(b" " * HEADER_BYTES)
    for chunk in torch.split(rows, CHUNK):
        plain = chunk.float()
        stored, scale = quantised(plain) if dtype == torch.int8 else (plain.to(dtype), None)
        back = stored.float() if scale is None else stored.float() * scale[:, None]
        if not bool(torch.isfinite(back).all()):
            raise ModelError(f"the item table has values that are not finite in {dtype}: name another --dtype")
        wrong, most = (back - plain).abs().amax(1), plain.abs().amax(1)
        done.error = max(done.error, float(wrong.max()))
        done.share = max(done.share, float((wrong / most.clamp(min=1e-30)).max()))
        largest = max(largest, float(most.max()))
        data = stored.contiguous().view(torch.uint8).numpy().tobytes()
        state.update(data)
        file.write(data)
        if scale is not None:
            scales.append(scale)
    at = rows.numel() * dtype.itemsize
    header: dict[str, object] = {"rows": {"dtype": _CODES[dtype], "shape": tuple(rows.shape), "data_offsets": (0, at)}}
    if scales:
        file.write(b" " * (pad := -at % 4))  # scales begin at a multiple of their size
        data = torch.cat(scales).numpy().tobytes()
        state.update(data)
        file.write(data)
        offsets = (at + pad, at + pad + len(data))
        header["scales"] = {"dtype": "F32", "shape": (len(rows),), "data_offsets": offsets}
    header["__metadata__"] = {"largest": repr(largest), "digest": state.hexdigest()}
    text = msgspec.json.encode(header)
    file.seek(0)
    file.write((HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(HEADER_BYTES - 8))
    file.seek(0, 2)


def quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (n, D) of float32 as int8, and the scale of each (n,): values differ by half a scale at most, 1/254 of the
    row's largest."""
    scale = rows.abs().amax(1) / _MOST
    stored = torch.round(rows / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).clamp(-_MOST, _MOST)
    return stored.to(torch.int8), scale
