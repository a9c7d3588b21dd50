"""The folders `topics/` and `workers/`: beside the package in a clone, inside it in an installed wheel."""

from __future__ import annotations

from pathlib import Path


def packaged_dir(name: str) -> Path:
    """The folder `name` as it travels with the program."""
    package = Path(__file__).resolve().parent
    inside = package / "_files" / name
    return inside if inside.is_dir() else package.parent / name
