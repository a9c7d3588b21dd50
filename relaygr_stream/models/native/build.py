"""Compiles the C of this package with the machine's own compiler, as Triton does for GPUs, and loads it.

There is a library for each kind of number, from the files that all kinds share and those in its folder. Nothing stays
on disk. Where there is no compiler, or no processor for it, callers go on without, and a log line says
why. Knows nothing of what the functions do.
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
#: Folder → the instructions it uses. Names as Linux has them in CPUINFO; the compiler's are the same but for the
#: underscores.
KINDS: Final = {
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "amx": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "amx_tile", "amx_bf16"),
}
#: It takes a second; a compiler behind a slow network file system, some.
COMPILE_TIMEOUT_S: Final = 60.0


@cache
def library(kind: str) -> ctypes.CDLL | None:
    """The compiled functions of a kind; None where this machine cannot have them. Compiles once per process."""
    if not set(KINDS[kind]) <= _instructions(CPUINFO):
        return None  # an ordinary CPU is nothing to report
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
    folders = FOLDER, FOLDER / kind
    # All in one: reading the intrinsics' headers for each file takes as long as compiling it.
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
