"""Put each mutant into a copy of the tree, run the tests that should notice it, and say which did not.

Never touches the tree itself. Exits 1 where a mutant survives, or where its text or its tests are not found any more,
and names it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Literal

from rich.console import Console
from rich.table import Table

from tests.mutants.listed import MUTANTS, Mutant

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = "relaygr_stream"
#: The slowest selection takes 30 s on a busy machine: what takes longer does not end, which is noticed, too.
TIMEOUT_S: Final = 180
#: All selections together, without a mutant, take 2 minutes where nothing else runs.
BASELINE_S: Final = 1200
#: How pytest ends: all passed; some failed; collecting failed, as where a module does not load; no such file.
PASSED, FAILED, NOT_COLLECTED, NO_SUCH_FILE = 0, 1, 2, 4

#: NOT JUDGED: its text or its tests are not found, or pytest ended in a way that says nothing of them.
Verdict = Literal["killed", "SURVIVED", "NOT JUDGED"]


def copy_tree(target: Path) -> None:
    """The files that git tracks, and those that it does not ignore, as they are now; and the compiled kernels."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    kernels = [str(file.relative_to(ROOT)) for file in (ROOT / PACKAGE).rglob("*.so")]
    for name in (*listed.stdout.decode().split("\0"), *kernels):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


def run_tests(
    tree: Path, tests: Sequence[str], *, timeout_s: float = TIMEOUT_S, write_bytecode: bool = False
) -> tuple[int, str]:
    """pytest's exit code, and the end of what it says. A run that does not end has FAILED."""
    # The tree's own package before the one that is installed. No run may leave a mutant's bytecode behind.
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"} | (
        {} if write_bytecode else {"PYTHONDONTWRITEBYTECODE": "1"}
    )
    files = [f"tests/unit/{name}.py" for name in tests]
    plugins = ("-p", "no:cacheprovider", "-p", "tests.mutants.quick")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *plugins, *files]
    try:
        done = subprocess.run(
            command, cwd=tree, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"no end within {timeout_s:g} s"
    return done.returncode, done.stdout[-2000:] + done.stderr[-2000:]


@contextmanager
def mutated(tree: Path, mutant: Mutant) -> Iterator[None]:
    """Within, the mutant is in the tree. Raises LookupError unless its text stands there once."""
    file = tree / PACKAGE / mutant.file
    before = file.read_text(encoding="utf-8") if file.is_file() else ""
    if before.count(mutant.text) != 1:
        raise LookupError(
            f"{PACKAGE}/{mutant.file} has `{mutant.text.strip()}` {before.count(mutant.text)} times, not once"
        )
    file.write_text(before.replace(mutant.text, mutant.instead), encoding="utf-8")
    for stale in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        stale.unlink()
    try:
        yield
    finally:
        file.write_text(before, encoding="utf-8")


def judge(tree: Path, mutant: Mutant) -> tuple[Verdict, str]:
    """What became of it, and a word about that."""
    try:
        with mutated(tree, mutant):
            code, said = run_tests(tree, mutant.tests.split())
    except LookupError as error:
        return "NOT JUDGED", f"{error.args[0]}: bring tests/mutants/listed.py up to date"
    if code == PASSED:
        return "SURVIVED", f"not noticed by tests/unit: {mutant.tests}"
    if code in (FAILED, NOT_COLLECTED):
        return "killed", ""
    return "NOT JUDGED", f"pytest ended with {code}: {' '.join(said.split())[-300:]}"


def check_baseline(tree: Path, mutants: Sequence[Mutant]) -> None:
    """The tests pass without a mutant, on the copy's own package; else a mutant's death would mean nothing."""
    where = subprocess.run(
        [sys.executable, "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)"],
        cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    if not Path(where).is_relative_to(tree):
        raise SystemExit(f"mutants: the tests would import {where}, not the copy in {tree}")
    tests = sorted({name for mutant in mutants for name in mutant.tests.split()})
    code, said = run_tests(tree, tests, timeout_s=BASELINE_S, write_bytecode=True)
    if code not in (PASSED, NO_SUCH_FILE):  # a file that is gone is told beside its mutant
        raise SystemExit(f"mutants: the tests fail without a mutant (pytest ended with {code}):\n{said}")


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose file has this in its path")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time, each in a copy of its own (default: 2)")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a mutant first")
    options = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if options.only in mutant.file]
    if not mutants:
        parser.error(f"--only {options.only}: no mutant has a file of that name")
    console, started = Console(highlight=False, markup=False), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="relaygr-mutants-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        first, *rest = (Path(folder) / str(number) for number in range(max(1, options.jobs)))
        copy_tree(first)
        if not options.no_baseline:
            console.print("running the tests without a mutant …")
            check_baseline(first, mutants)
        for tree in (first, *rest):
            if tree is not first:
                shutil.copytree(first, tree)
            trees.put(tree)

        def one(mutant: Mutant) -> tuple[Verdict, str]:
            tree, began = trees.get(), time.monotonic()
            try:
                verdict, why = judge(tree, mutant)
            finally:
                trees.put(tree)
            took = f"{time.monotonic() - began:.0f} s"
            console.print(f"{verdict:<10}  {took:>5}  {mutant.file}: {mutant.text.strip()}", soft_wrap=True)
            return verdict, why

        with ThreadPoolExecutor(max(1, options.jobs)) as pool:
            verdicts = list(pool.map(one, mutants))
    report(console, mutants, verdicts)
    killed = sum(verdict == "killed" for verdict, _ in verdicts)
    console.print(f"{killed} of {len(mutants)} mutants killed in {time.monotonic() - started:.0f} s")
    return 0 if killed == len(mutants) else 1


def report(console: Console, mutants: Sequence[Mutant], verdicts: Sequence[tuple[Verdict, str]]) -> None:
    """Per package how many were killed, then each that was not."""
    table = Table("package", "mutants", "killed", box=None, pad_edge=False, header_style="bold")
    for package in dict.fromkeys(mutant.file.split("/")[0] for mutant in mutants):
        mine = [
            verdict
            for mutant, (verdict, _) in zip(mutants, verdicts, strict=True)
            if mutant.file.startswith(f"{package}/")
        ]
        table.add_row(package, str(len(mine)), str(sum(verdict == "killed" for verdict in mine)))
    console.print(table)
    for mutant, (verdict, why) in zip(mutants, verdicts, strict=True):
        if verdict != "killed":
            console.print(
                f"{verdict}: {mutant.file}: `{mutant.text.strip()}` → `{mutant.instead.strip()}`; {why}", soft_wrap=True
            )


if __name__ == "__main__":
    sys.exit(main())
