"""The docs name tests and files that exist, and docs/explanation/reliability.md misses no fault test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
RELIABILITY = "docs/explanation/reliability.md"
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


def test_everything_that_nobody_can_do_has_a_test() -> None:
    table = PAGES["docs/reference/security.md"].partition("| who | can | cannot, because |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()[2:]]
    assert len(rows) > 10
    for row in rows:
        who, cannot = row[0], "" if len(row) < 3 else row[2]
        outside = re.sub(r"\([^()]*\)", lambda aside: aside[0].replace(";", ","), cannot)
        for claim in filter(None, outside.split(";")):
            assert "`tests/" in claim, f"{who}: no test shows that it cannot {claim.strip()}"


def test_every_row_of_the_fault_table_names_a_test() -> None:
    table = PAGES[RELIABILITY].partition("| fault | outcome | tests |")[2].partition("\n\n")[0]
    rows = table.splitlines()[2:]
    assert len(rows) > 30
    for row in rows:
        assert NAMED.search(row.rsplit("|", 2)[1]), row


def test_every_row_of_what_nobody_can_do_names_a_test() -> None:
    """That they exist, test_every_file_and_test_named_exists sees."""
    table = PAGES["docs/reference/security.md"].partition("| who | can | cannot, because |")[2].partition("\n\n")[0]
    claims = [row.rsplit("|", 2)[1] for row in table.splitlines()[2:]]
    assert len(claims) > 10
    assert [claim for claim in claims if claim.strip() and "`tests/" not in claim] == []


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
    named = {test for _, test, _ in _named(RELIABILITY)}
    marked = {test for path, source in TEST_FILES.items() if path.parent.name == "faults" for test in _faults(source)}
    assert len(marked) > 20
    assert marked - named == set()
