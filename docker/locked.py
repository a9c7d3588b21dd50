"""What `make lock` locks: the dependencies of pyproject.toml less torch, those of EXTRAS too, or what builds the wheel.

usage: locked.py requirements|build
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Final

#: Extras of the program that every image has.
EXTRAS: Final = ("gateway", "otel", "redis")


def wanted(what: str) -> list[str]:
    """Requirements as pyproject.toml has them. torch is excepted: which of its builds is taken, its index decides."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    lines: list[str] = project["build-system"]["requires"]
    if what != "build":
        extras = project["project"]["optional-dependencies"]
        lines = project["project"]["dependencies"] + [line for extra in EXTRAS for line in extras[extra]]
    return [line for line in lines if not line.startswith("torch")]


if __name__ == "__main__":
    print(*wanted(sys.argv[1]), sep="\n")
