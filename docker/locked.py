"""What `make lock` locks: the dependencies of pyproject.toml less torch, or what builds the wheel.

usage: locked.py requirements|build
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def wanted(what: str) -> list[str]:
    """Requirements as pyproject.toml has them. torch is excepted: which of its builds is taken, its index decides."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    lines: list[str] = project["build-system"]["requires"] if what == "build" else project["project"]["dependencies"]
    return [line for line in lines if not line.startswith("torch")]


if __name__ == "__main__":
    print(*wanted(sys.argv[1]), sep="\n")
