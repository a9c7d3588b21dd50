"""docs/reliability.md names tests that exist, and no fault test is missing from it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
#: `file.py::test`, `file.py` or, for another of the file named before, `::test`.
NAMED = re.compile(r"`([\w/.]*\.py)?(?:::(test_\w+))?(?: -k \w+)?`")


def _named() -> list[tuple[Path, str]]:
    named, file = [], Path()
    for path, test in NAMED.findall(DOC):
        if path:
            file = ROOT / path if "/" in path else ROOT / "tests" / "faults" / path
        if path or test:
            named.append((file, test))
    return named


def test_every_test_named_exists() -> None:
    for file, test in _named():
        assert file.is_file(), f"{file} does not exist"
        assert not test or f"def {test}(" in file.read_text(encoding="utf-8"), f"{file} has no {test}"


def test_every_fault_test_is_named() -> None:
    named = {test for _, test in _named()}
    for file in (ROOT / "tests" / "faults").glob("test_*.py"):
        source = file.read_text(encoding="utf-8")
        marked = (
            ""
            if re.search(r"^pytestmark = .*faults", source, re.M)
            else r"@pytest\.mark\.faults\n(?:@.*\n)*(?:async )?"
        )
        assert set(re.findall(rf"{marked}def (test_\w+)\(", source)) <= named, file.name
