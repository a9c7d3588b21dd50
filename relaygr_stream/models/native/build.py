"""Compiles this package's C code with the machine's own compiler and loads it, as Triton does for GPUs.

Each kind of number has a library, built from the shared files and those in the kind's folders. The library is not
kept on disk. Without a compiler or the processor's instructions there is no library; the log says why.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger(__name__)

FOLDER: Final = Path(__file__).parent
CPUINFO: Final = Path("/proc/cpuinfo")
_AVX512: Final = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
#: Kind → the instruction sets that it uses, by their names in CPUINFO. The compiler's names differ in underscores.
KINDS: Final = {
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "avx512_bf16"),
    "avx512_widened": _AVX512,
    "amx": (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
}
#: Kind → the folders of its library, besides FOLDER itself.
FOLDERS: Final = {
    "avx512": ("vectors", "avx512"),
    "avx512_bf16": ("vectors", "bfloat16", "avx512_bf16"),
    "avx512_widened": ("vectors", "bfloat16", "avx512_bf16"),  # the same without its instructions
    "amx": ("bfloat16", "amx"),
}
#: Compiling takes a second, and longer with a compiler on a slow network file system.
COMPILE_TIMEOUT_S: Final = 60.0


@cache
def library(kind: str) -> ctypes.CDLL | None:
    """The compiled functions of a kind; None if this machine cannot build or run them. Compiles once per process."""
    if not set(KINDS[kind]) <= _instructions(CPUINFO):
        return None  # not logged: a CPU without these instructions is normal
    try:
        loaded = _compile(kind, os.environ.get("CC", "cc"))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("native_layers_unavailable", reason=_reason(error), remedy="install a C compiler, or set CC to it")
        return None
    if loaded.relaygr_unavailable():
        log.warning("native_layers_unavailable", reason=f"the kernel does not grant this process what {kind} needs")
        return None
    log.info("native_layers_loaded", instructions=kind)
    return loaded


def _instructions(cpuinfo: Path) -> set[str]:
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in text.splitlines() if line.startswith("flags")), set())


def _compile(kind: str, compiler: str) -> ctypes.CDLL:
    """Raises OSError or SubprocessError."""
    folders = FOLDER, *(FOLDER / name for name in FOLDERS[kind])
    # One compilation for all files: reading the intrinsics' headers takes as long as compiling a file.
    source = "".join(f'#include "{file}"\n' for folder in folders for file in sorted(folder.glob("*.c")))
    with tempfile.TemporaryDirectory(prefix="relaygr-") as temporary:
        target = Path(temporary) / "native.so"
        flags = [f"-m{name.replace('avx512_', 'avx512').replace('_', '-')}" for name in KINDS[kind]]
        command = [
            *shlex.split(compiler),
            *("-O3", "-std=gnu11", "-fPIC", "-shared"),
            *flags,
            *(f"-I{folder}" for folder in folders),
            *("-x", "c", "-", "-o", str(target)),
        ]
        subprocess.run(command, check=True, input=source.encode(), capture_output=True, timeout=COMPILE_TIMEOUT_S)
        return ctypes.CDLL(str(target))


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines: list[str] = error.stderr.decode(errors="replace").strip().splitlines()
        return lines[0] if lines else f"{error.cmd[0]} exited with {error.returncode}"
    return str(error)
