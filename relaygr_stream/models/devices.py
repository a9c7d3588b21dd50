"""Selects the device: a name from the settings → torch.device, or a DeviceError that says what is missing.

The functions import torch, not the module: where torch_npu is installed without CANN, `import torch` itself fails, and
this module reports it.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, Final, cast

from relaygr_stream.errors import DeviceError

if TYPE_CHECKING:
    import torch

#: With "0", `import torch` does not import other backends (torch_npu) automatically.
AUTOLOAD: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"

_REMEDIES: Final = {
    "cuda": 'install a CUDA build of torch and the NVIDIA driver, or set worker.device = "cpu"',
    "npu": "install the Ascend driver and CANN (source its set_env.sh) and the extra `npu`, or set worker.device = "
    '"cpu"',
}


def select_device(name: str) -> torch.device:
    """The device named `cpu`, `cuda[:N]` or `npu[:N]`; N defaults to 0.

    Call it before any other import of torch: it prevents torch from loading unused backends. It imports torch_npu for
    `npu` only. Raises DeviceError if the device is not available, saying what is missing and what to do.
    """
    kind, _, index = name.partition(":")
    if kind not in ("cpu", *_REMEDIES) or (index and not index.isdecimal()):
        raise DeviceError(f"device {name!r}: write cpu, cuda, cuda:N, npu or npu:N")
    torch_module = _import_torch()
    if kind == "cpu":
        return _device(torch_module, "cpu")
    if kind == "npu":
        _import_torch_npu()
    module = torch_module.get_device_module(kind)
    count = int(module.device_count()) if module.is_available() else 0
    if count == 0:
        raise DeviceError(
            f"device {name!r}: torch {torch_module.__version__} finds no {kind} device; {_REMEDIES[kind]}"
        )
    if int(index or 0) >= count:
        raise DeviceError(f"device {name!r}: there are {count} {kind} devices, numbered from 0")
    return _device(torch_module, kind, int(index or 0))


def _device(torch_module: Any, kind: str, *index: int) -> torch.device:
    return cast("torch.device", torch_module.device(kind, *index))


def _import_torch() -> Any:
    if "torch" not in sys.modules:
        os.environ.setdefault(AUTOLOAD, "0")
    try:
        return importlib.import_module("torch")
    except (ImportError, RuntimeError, OSError) as error:
        raise DeviceError(
            f"torch cannot be imported: {_first_line(error)}. If a backend such as torch_npu is installed without its "
            f"driver libraries, set {AUTOLOAD}=0 in the environment, or uninstall it"
        ) from error


def _import_torch_npu() -> None:
    try:
        importlib.import_module("torch_npu")
    except ModuleNotFoundError as error:
        if error.name != "torch_npu":
            raise DeviceError(f"torch_npu needs {error.name}, which is not installed") from error
        raise DeviceError(
            "device npu: torch_npu is not installed; install the extra `npu` (its version follows torch's)"
        ) from error
    except (ImportError, RuntimeError, OSError) as error:
        raise DeviceError(
            f"device npu: torch_npu cannot be loaded: {_first_line(error)}. It needs CANN, Ascend's runtime libraries: "
            f"install CANN and source its set_env.sh before starting. On a machine without an NPU set worker.device = "
            f'"cpu"; {AUTOLOAD}=0 in the environment keeps other programs\' `import torch` from failing the same way'
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
