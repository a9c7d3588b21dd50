"""Loads the functions in C: an object file for each instruction set and type of number.

CMakeLists.txt says how they are compiled, hatch_build.py puts them into the wheel, beside this file. Which of them runs
is decided here, by what the processor has and what the settings allow.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger(__name__)

FOLDER: Final = Path(__file__).parent
CPUINFO: Final = Path("/proc/cpuinfo")
_AVX2: Final = ("avx2", "fma")
_AVX512: Final = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
#: Object → the instruction sets that it uses, by their names in CPUINFO.
OBJECTS: Final = {
    "avx2": _AVX2,
    "avx2_widened": _AVX2,  # bfloat16 by vectors of float32
    "avx512": _AVX512,
    "avx512_widened": _AVX512,  # bfloat16 without instructions for it
    "avx512_bf16": (*_AVX512, "avx512_bf16"),
    "amx": (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
}


class Unavailable(Exception):
    """No object can run; says why."""


def library(names: Sequence[str], most: str = "") -> ctypes.CDLL:
    """The first of the objects `names` that this processor runs.

    most: the object whose instructions are the most that may be used; "": all that the processor has.
    Raises Unavailable. Warns once where an object that the processor could run does not load.
    """
    has = instructions(CPUINFO)
    if lacking := [each for each in OBJECTS.get(most, ()) if each not in has]:
        raise Unavailable(f"this processor has no {', '.join(lacking)}")
    allowed = has.intersection(OBJECTS[most]) if most else has
    reasons = []
    for name in (name for name in names if allowed.issuperset(OBJECTS[name])):
        try:
            found = _load(FOLDER / f"{name}.so")
        except OSError as error:
            reasons.append(str(error))
            continue
        if reasons:
            warn_once(reasons[0], instead=name)
        return found
    if not reasons:
        raise Unavailable("this processor does not have the instructions of any of them: " + ", ".join(names))
    warn_once(reasons[0], instead="torch operators")
    raise Unavailable(reasons[0])


@cache
def _load(file: Path) -> ctypes.CDLL:
    """Raises OSError."""
    if not file.is_file():
        raise OSError(
            f"{file.name} is missing: relaygr-stream was built without a C compiler; install one, then relaygr-stream "
            f"again (in a clone: make setup)"
        )
    loaded = ctypes.CDLL(str(file))
    if loaded.relaygr_unavailable():
        raise OSError(f"the kernel does not grant this process what {file.name} needs")
    return loaded


@cache
def warn_once(reason: str, *, instead: str) -> None:
    """Log why faster layers cannot be used, once a process for each reason."""
    log.warning("native layers unavailable", reason=reason, instead=instead)


def instructions(cpuinfo: Path) -> set[str]:
    """The names of the processor's instruction sets; none where the file does not list them."""
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in text.splitlines() if line.startswith("flags")), set())
