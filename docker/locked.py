"""What `make lock` locks: what images, `make setup` and the build of the wheel install, less torch and triton.

usage: locked.py requirements|setup|build|uv
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Final

#: Extras of the program that every image has.
EXTRAS: Final = ("gateway", "otel", "redis")
#: What hatchling needs for an editable installation, which it asks for only at build time.
EDITABLE: Final = "editables>=0.5"
#: Their builds differ by index and device, so they have a version (constraints.txt) and no hash.
EXCEPTED: Final = ("torch", "triton")


def wanted(what: str) -> list[str]:
    """Requirements as pyproject.toml has them."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    lines: list[str] = project["build-system"]["requires"]
    extras: dict[str, list[str]] = project["project"]["optional-dependencies"]
    if what == "uv":  # installs torch in images (torch.sh)
        return [line for line in extras["dev"] if line.startswith("uv>")]
    if what != "build":
        lines = project["project"]["dependencies"] + [
            line for extra in (EXTRAS if what == "requirements" else ("dev",)) for line in _of(extras, extra)
        ]
    if what == "setup":
        lines = [*lines, EDITABLE]
    return [line for line in lines if not line.startswith(EXCEPTED)]


def _of(extras: dict[str, list[str]], extra: str) -> list[str]:
    """The requirements of an extra, and of the extras that it names."""
    found = []
    for line in extras[extra]:
        own = re.match(r"relaygr-stream\[(.*)\]", line)
        found += [each for name in own[1].split(",") for each in _of(extras, name)] if own else [line]
    return found


if __name__ == "__main__":
    print(*wanted(sys.argv[1]), sep="\n")
