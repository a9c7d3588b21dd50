"""Which test files may cover a module: by what they import, by their name, or by their folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path


def candidates(root: Path, package: str, module: Path) -> list[Path]:
    """Files below tests/unit that import `module`, themselves, through helpers or through a package's `__init__.py`;
    that begin with its name or its package's; or that are in the folder of its package. `module` is relative to `root`,
    results as well."""
    tests = sorted(path.relative_to(root) for path in (root / "tests" / "unit").rglob("test_*.py"))
    folder = Path("tests", "unit", *module.parts[1:-1])
    home = folder if folder != Path("tests", "unit") else None
    return [
        test
        for test in tests
        if test.stem.startswith((f"test_{module.stem}", f"test_{module.parent.name}"))
        or (home is not None and home in test.parents)
        or module in _reached(root, package, test)
    ]


@cache
def _reached(root: Path, package: str, test: Path) -> frozenset[Path]:
    """The modules of the package that a test file imports; conftest.py of its folders is imported, too."""
    open_, seen = [test, *(folder / "conftest.py" for folder in test.parents)], set[Path]()
    while open_:
        file = open_.pop()
        if file not in seen and (root / file).is_file():
            seen.add(file)
            if file.parts[0] != package or file.name == "__init__.py":
                open_ += _imports(root, file)
    return frozenset(file for file in seen if file.parts[0] == package)


@cache
def _imports(root: Path, file: Path) -> tuple[Path, ...]:
    """The files that a file imports by absolute names; those of names that it imports from packages as well."""
    names = set[str]()
    for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return tuple(found for name in names for found in _files(name))


def _files(name: str) -> Iterator[Path]:
    path = Path(*name.split("."))
    yield path.with_suffix(".py")
    yield path / "__init__.py"
