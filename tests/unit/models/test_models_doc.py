"""docs/explanation/exactness.md names tests, guards and headings: they exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from relaygr_stream.models.check.registry import PROPERTIES

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "explanation" / "exactness.md").read_text("utf-8")
ROWS = re.findall(r"^\| (.+?) \| (`models/.+?|`engine/.+?|`worker/.+?) \| `(tests/\S+)::(\w+)` \|$", TEXT, re.M)


def test_the_table_has_every_hazard() -> None:
    table = TEXT.partition("| hazard | guard | test |\n")[2].partition("\n\n")[0]
    assert len(ROWS) == len(table.splitlines()) - 1 > 10  # less the rule; every row was understood


@pytest.mark.parametrize(("hazard", "guard", "file", "test"), ROWS)
def test_guards_and_tests_exist(hazard: str, guard: str, file: str, test: str) -> None:
    assert f"def {test}(" in (ROOT / file).read_text("utf-8")
    for part in guard.split("; "):
        code = (ROOT / "relaygr_stream" / part.split("`")[1]).read_text("utf-8")
        symbols = re.findall(r"`([\w.]+)`", part.split(": ", 1)[1])
        assert symbols
        for symbol in symbols:
            assert re.search(rf"\b{symbol.rpartition('.')[2]}\b", code), symbol


def test_every_hazard_that_the_checker_names_has_a_heading() -> None:
    headings = {
        re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", TEXT, re.M)
    }
    linked = set(re.findall(r"\(#([\w-]+)\)", TEXT))
    assert {one.hazard for one in PROPERTIES if one.hazard} | linked <= headings
