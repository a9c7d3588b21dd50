"""Reads the tensors of a checkpoint that another program wrote, without running code from it.

A file of torch.save (weights_only=True), safetensors, a folder of torch.distributed.checkpoint, or the folder that
DLRMv3's training writes: non_sparse.ckpt beside such a folder `sparse`. Nested tables become dotted names.
"""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from relaygr_stream.errors import ModelError
from relaygr_stream.settings.inputs import LFS_POINTER, check_regular, is_pointer, open_regular, pointer_error

METADATA: Final = ".metadata"
DENSE: Final = "non_sparse.ckpt"
SPARSE: Final = "sparse"
#: Bound of a `.metadata` file: a model of some thousand tensors in some thousand shards has a few MiB.
MAX_METADATA_BYTES: Final = 1 << 30
#: What a `.metadata` file may name. It is a pickle, and the plain unpickler would call whatever it names.
ALLOWED: Final = {
    "collections": {"OrderedDict"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},
}  # fmt: skip

PATHS: Final = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"}

#: What to do about a file that cannot be read, and about one with objects, which would run code.
STATE_DICT: Final = "write one by torch.save(model.state_dict(), FILE)"
WEIGHTS_ALONE: Final = (
    "it has objects beside tensors. If you trust it, keep the weights alone, where these objects' module is installed: "
    'torch.save(torch.load(FILE, weights_only=False)["state_dict"], NEW), or, of a whole model, `.state_dict()` in '
    'place of `["state_dict"]`'
)
#: A word of the reason → what to do.
ADVICE: Final = {
    "GLOBAL": WEIGHTS_ALONE,
    "TorchScript": "it has code. If you trust it, write torch.save(torch.jit.load(FILE).state_dict(), NEW)",
}

READ_ERRORS: Final = (
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    EOFError,
    SafetensorError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint at `path` by their dotted names, on the CPU, but those of optimizers.

    Raises ModelError, naming the file and what can be read.
    """
    if not path.is_dir():
        return _read_file(path)
    if (path / METADATA).is_file():
        return _read_distributed(path)
    if (path / DENSE).is_file():
        sparse = _read_distributed(path / SPARSE) if (path / SPARSE / METADATA).is_file() else {}
        return _read_file(path / DENSE) | sparse
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        there = ", ".join(sorted(one.name for one in path.iterdir()))
        raise ModelError(
            f"{path}: no checkpoint; expected `{METADATA}` (torch.distributed.checkpoint), `{DENSE}` (DLRMv3's "
            f"training) or *.safetensors in this folder, or name a file; it has {there[:200] or 'nothing'}"
        )
    found: dict[str, torch.Tensor] = {}
    for shard in shards:
        more = _read_file(shard)
        if twice := sorted(found.keys() & more.keys()):
            raise ModelError(f"{shard}: `{twice[0]}` is in another file of the folder, too: name one file")
        found |= more
    return found


def _read_file(file: Path) -> dict[str, torch.Tensor]:
    try:
        check_regular(file)
        with open_regular(file) as raw:
            start = raw.read(len(LFS_POINTER))
        if is_pointer(start):
            raise pointer_error(file)
        if start[8:9] == b"{":  # what safetensors begins with, behind the length of its header
            return load_file(file)
        with warnings.catch_warnings():  # of formats that are refused below
            warnings.simplefilter("ignore", UserWarning)
            # A file of the old format is no archive, and cannot be mapped.
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=start.startswith(b"PK"))
    except FileNotFoundError as error:
        raise ModelError(f"{file}: no such file") from error
    except READ_ERRORS as error:
        why = _reason(error)
        advice = next((advice for word, advice in ADVICE.items() if word in why), STATE_DICT)
        raise ModelError(f"{file}: cannot be read as a state dict, by torch or safetensors: {why}; {advice}") from error
    found = _flat(loaded, "") if isinstance(loaded, Mapping) else {}
    if not found:
        raise ModelError(f"{file}: no state dict, but a {type(loaded).__name__} without named tensors; {STATE_DICT}")
    return found


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, (LookupError, EOFError)):  # of torch's reader of old files, in bytes that are none
        return "neither has written it"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # torch's advice is to switch the protection off; its last sentence names what the file wanted to run.
    named = next((line for line in lines if "Unsupported" in line or "GLOBAL" in line), "")
    found = named.partition(" by default.")[0] or (lines[0] if lines else type(error).__name__)
    return found.partition(". ")[0].rstrip(".")


def _flat(table: Mapping[Any, Any], prefix: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if _is_optimizer(name):
            continue
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, Mapping):
            found |= _flat(value, f"{name}.")
    return found


def _is_optimizer(name: str) -> bool:
    return any(part.startswith("optim") for part in name.split("."))


# torch.distributed.checkpoint: `.metadata` says in which file, and where there, each piece of a tensor lies.


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib") and name in PATHS:  # the folder that it was saved to; never opened
            return PurePosixPath
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of such a file")
        return super().find_class(module, name)


def _read_distributed(folder: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata  # noqa: PLC0415  # takes a second

    file = folder / METADATA
    try:
        with open_regular(file) as raw:
            metadata = _Unpickler(io.BytesIO(raw.read(MAX_METADATA_BYTES))).load()
    except READ_ERRORS as error:
        raise ModelError(f"{file}: not the metadata of torch.distributed.checkpoint: {_reason(error)}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ModelError(f"{file}: not the metadata of torch.distributed.checkpoint")
    wanted = {
        name: about
        for name, about in metadata.state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata) and not _is_optimizer(name)
    }
    found = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in wanted.items()}
    filled = dict.fromkeys(wanted, 0)
    for index, where in metadata.storage_data.items():
        if index.fqn in found:
            filled[index.fqn] += _place(folder, where, index, found[index.fqn])
    short = next((name for name, count in filled.items() if count < found[name].numel()), None)
    if short is not None:
        raise ModelError(
            f"{folder}: `{short}` is not whole: {filled[short]} of {found[short].numel()} numbers are there"
        )
    return found


def _place(folder: Path, where: Any, index: Any, into: torch.Tensor) -> int:
    """Copy one piece to its place; returns its numbers."""
    file = folder / where.relative_path
    try:
        if Path(where.relative_path).name != where.relative_path:
            raise ValueError(f"{where.relative_path!r} lies outside the folder")
        if getattr(where, "transform_descriptors", None):
            raise ValueError(f"it is stored with {', '.join(where.transform_descriptors)}; save it without")
        with open_regular(file) as raw:
            piece = _piece(raw, where.offset, where.length)
        view = into
        for dimension, (start, size) in enumerate(zip(index.offset or (0,) * piece.dim(), piece.shape, strict=True)):
            view = view.narrow(dimension, start, size)
        view.copy_(piece)
    except READ_ERRORS as error:
        raise ModelError(f"{file}: `{index.fqn}` cannot be read: {_reason(error)}") from error
    return piece.numel()


def _piece(raw: IO[bytes], offset: int, length: int) -> torch.Tensor:
    raw.seek(offset)
    loaded = torch.load(io.BytesIO(raw.read(length)), map_location="cpu", weights_only=True)
    if not isinstance(loaded, torch.Tensor):
        raise TypeError(f"a {type(loaded).__name__}, not a tensor")
    return loaded
