"""Compiles the C of this package with the machine's own compiler, as Triton does for GPUs, and loads it.

Nothing stays on disk. Where there is no compiler, or no processor for it, callers go on without, and a log line says
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
#: Names as Linux has them in /proc/cpuinfo; the compiler's are the same but for the underscores.
INSTRUCTIONS: Final = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "amx_tile", "amx_bf16")
_FLAGS: Final = [f"-m{name.replace('avx512_', 'avx512').replace('_', '-')}" for name in INSTRUCTIONS]
#: It takes a second; a compiler behind a slow network file system, some.
COMPILE_TIMEOUT_S: Final = 60.0


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None where this machine cannot have them. Compiles once per process."""
    if not set(INSTRUCTIONS) <= _instructions(Path("/proc/cpuinfo")):
        return None  # an ordinary CPU is nothing to report
    try:
        loaded = _compile(sorted(FOLDER.glob("*.c")), os.environ.get("CC", "cc"))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("native_layers_unavailable", reason=_reason(error), remedy="install a C compiler, or set CC to it")
        return None
    if loaded.relaygr_request_tiles():
        log.warning("native_layers_unavailable", reason="the kernel does not grant this process the AMX registers")
        return None
    log.info("native_layers_loaded", instructions="amx_bf16")
    return loaded


def _instructions(cpuinfo: Path) -> set[str]:
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in text.splitlines() if line.startswith("flags")), set())


def _compile(sources: list[Path], compiler: str) -> ctypes.CDLL:
    """Raises OSError or SubprocessError."""
    with tempfile.TemporaryDirectory(prefix="relaygr-") as folder:
        target = Path(folder) / "native.so"
        command = [
            *shlex.split(compiler),
            "-O3",
            "-std=gnu11",
            "-fPIC",
            "-shared",
            *_FLAGS,
            *map(str, sources),
            "-o",
            str(target),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
        return ctypes.CDLL(str(target))


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines: list[str] = error.stderr.decode(errors="replace").strip().splitlines()
        return lines[0] if lines else f"{error.cmd[0]} exited with {error.returncode}"
    return str(error)
