"""The docs and tests/shown.toml name tests and files that exist, and the latter misses no claim and no fault test."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
SHOWN = "tests/shown.toml"
PAGES[SHOWN] = (ROOT / SHOWN).read_text(encoding="utf-8")
TESTS_OF: dict[str, dict[str, str]] = tomllib.loads(PAGES[SHOWN])
#: `file.py::test`, `file.py`, `file.py -k word` or, for another of the file named before, `::test`.
NAMED = re.compile(r"`([\w/.]*\.py)?(?:::(test_\w+))?(?: -k (\w+))?`")
TEST_FILES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
TESTS = {test for source in TEST_FILES.values() for test in re.findall(r"def (test_\w+)\(", source)}


def _named(page: str) -> list[tuple[str, str, str]]:
    """(file, test or nothing, -k's word or nothing), as the page writes them."""
    named, file = [], ""
    for path, test, word in NAMED.findall(PAGES[page]):
        if path:
            file = path
        if path or test:
            named.append((file, test, word))
    return named


def _found(file: str) -> Path:
    """Tests without a folder are faults; other files are named from the root or from the package."""
    folders = [ROOT / "tests" / "faults"] if file.startswith("test_") else [ROOT, ROOT / "relaygr_stream"]
    if "/" not in file:
        folders += [*{path.parent for path in ROOT.glob("tests/**/*.py")}, *(ROOT / "relaygr_stream").rglob("*/")]
    return next((each / file for each in folders if (each / file).is_file()), ROOT / file)


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_test_named_exists(page: str) -> None:
    for file, test, word in _named(page):
        path = _found(file)
        if "/" in file or test or word:
            assert path.is_file(), f"{page}: {file} does not exist"
        if test or word:
            tests = re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8"))
            assert not test or test in tests, f"{page}: {file} has no {test}"
            assert any(word in each for each in tests), f"{page}: {file} has no test for -k {word}"
    for test in re.findall(r"`(?:::)?(test_\w+)`", PAGES[page]):
        assert test in TESTS, f"{page}: there is no {test}"


def _rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table below this heading."""
    table = PAGES[page].partition(f"{heading}\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in row[1:-1].split(" | ")] for row in table.splitlines()[1:]]


def _claims() -> list[str]:
    """Each thing that security.md says somebody cannot do; a semicolon ends one, unless in brackets."""
    found = []
    for who, _, cannot in _rows("docs/reference/security.md", "| who | can | cannot |"):
        outside = re.sub(r"\([^()]*\)", lambda aside: aside[0].replace(";", "\0"), cannot)
        found += [f"{who}: {claim.strip()}".replace("\0", ";") for claim in outside.split(";") if claim.strip()]
    return found


def test_everything_that_nobody_can_do_has_a_test() -> None:
    assert len(_claims()) > 20
    assert _claims() == list(TESTS_OF["cannot"])
    assert [claim for claim, tests in TESTS_OF["cannot"].items() if "`tests/" not in tests] == []


def test_every_row_of_the_fault_table_has_a_test() -> None:
    faults = [row[0] for row in _rows("docs/explanation/reliability.md", "| fault | outcome |")]
    assert len(faults) > 30
    assert faults == list(TESTS_OF["faults"])
    assert [fault for fault, tests in TESTS_OF["faults"].items() if not NAMED.search(tests)] == []


def test_what_is_proven_is_on_the_page() -> None:
    rows = [row[0] for row in _rows("docs/reference/security.md", "| what | by whom | proof |")]
    assert TESTS_OF["proven"]
    assert set(TESTS_OF["proven"]) <= set(rows)


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith(("docs/how-to", "docs/reference"))])
def test_no_table_for_operators_names_a_test(page: str) -> None:
    assert [row for row in PAGES[page].splitlines() if row.startswith("|") and re.search(r"test_\w+", row)] == []


def _faults(source: str) -> set[str]:
    """The tests with the mark `faults`, which is theirs or the whole file's."""
    body = ast.parse(source).body
    tests = [each for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    whole = any(ast.unparse(each).startswith("pytestmark =") and _has_mark(each) for each in body)
    return {
        test.name
        for test in tests
        if test.name.startswith("test_") and (whole or any(map(_has_mark, test.decorator_list)))
    }


def _has_mark(node: ast.AST) -> bool:
    return "pytest.mark.faults" in ast.unparse(node)


def test_every_fault_test_is_named() -> None:
    named = {test for page in (SHOWN, "docs/explanation/reliability.md") for _, test, _ in _named(page)}
    marked = {test for path, source in TEST_FILES.items() if path.parent.name == "faults" for test in _faults(source)}
    assert len(marked) > 20
    assert marked - named == set()
