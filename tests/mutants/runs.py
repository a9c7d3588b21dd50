"""Runs of pytest in copies of a tree: one without a mutant, which notes who runs which line, then one a mutant."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from tests.mutants.operators import Mutation

#: A run that takes this many times what its tests took without the mutant does not end.
SLACK: Final = 5
#: Start of pytest on a busy machine.
START_S: Final = 30
#: Of the run without a mutant: `make test` takes seven minutes, and noting lines doubles it.
CLEAN_S: Final = 1800
PASSED: Final = 0
INTERNAL_ERROR: Final = 3

#: Processes of pytest that run now.
_running: Final = set[int]()

Verdict = Literal["killed", "SURVIVED", "NOT REACHED"]


class Mutant(NamedTuple):
    """A mutation of a module, whose path is relative to the tree."""

    module: Path
    mutation: Mutation


class Clean(NamedTuple):
    """Of the run without a mutant, per test: seconds, and the lines it runs of each module."""

    seconds: dict[str, float]
    lines: dict[str, dict[Path, frozenset[int]]]

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Tests that run the mutant's statement, those of quick files first. What runs when a module is loaded is
        taken to matter to each test that runs a line of it, or to all if none does."""
        module, mutation = mutant
        if mutation.at_import:
            found = [test for test, lines in self.lines.items() if lines[module]] or list(self.lines)
        else:
            statement = frozenset(range(mutation.first, mutation.last + 1))
            found = [test for test, lines in self.lines.items() if statement & lines[module]]
        files: dict[str, float] = {}
        for test in found:
            files[_file(test)] = files.get(_file(test), 0.0) + self.seconds[test]
        return sorted(found, key=lambda test: (files[_file(test)], _file(test)))


def copy_tree(root: Path, target: Path) -> None:
    """The files that git tracks, and those that it does not ignore, as they are now; and the compiled kernels."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    kernels = [str(file.relative_to(root)) for file in root.glob("relaygr_stream/**/*.so")]
    for name in (*listed.stdout.decode().split("\0"), *kernels):
        if name and (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, target / name)


def run_clean(tree: Path, modules: Sequence[Path], tests: Sequence[Path]) -> Clean:
    """The tests without a mutant. Raises SystemExit if they fail, for then no mutant's death means anything."""
    trace = tree / ".mutants-trace.json"
    noting = {"MUTANTS_TRACE": str(trace), "MUTANTS_FILES": os.pathsep.join(str(tree / name) for name in modules)}
    code, said = _pytest(tree, [str(test) for test in tests], CLEAN_S, noting)
    if code != PASSED:
        raise SystemExit(f"mutants: the tests do not pass without a mutant (pytest ended with {code}):\n{said}")
    noted = json.loads(trace.read_text(encoding="utf-8"))
    return Clean(
        {test: entry["seconds"] for test, entry in noted.items()},
        {
            test: {name: frozenset(entry["lines"][str(tree / name)]) for name in modules}
            for test, entry in noted.items()
        },
    )


def judge(tree: Path, mutant: Mutant, clean: Clean) -> tuple[Verdict, str]:
    """Put the mutant into the tree, run the tests that reach it up to the first that fails, and take it out again.
    Returns with the verdict what pytest said last. Raises SystemExit where pytest itself fails or is killed."""
    tests = clean.tests_of(mutant)
    if not tests:
        return "NOT REACHED", ""
    file = tree / mutant.module
    before = file.read_text(encoding="utf-8")
    file.write_text(mutant.mutation.apply(before), encoding="utf-8")
    for stale in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        stale.unlink()
    try:
        limit_s = START_S + SLACK * sum(clean.seconds[test] for test in tests)
        # Whatever else than "all passed" comes of it, these tests have noticed: their module does not load, none of
        # their names is known any more, or there is no end.
        code, said = _pytest(tree, tests, limit_s, {})
    finally:
        file.write_text(before, encoding="utf-8")
    if code is not None and (code < PASSED or code == INTERNAL_ERROR):
        raise SystemExit(f"mutants: pytest ended with {code}, which is no verdict:\n{said}")
    if code is None:
        return "killed", f"no end within {limit_s:.0f} s"
    lines = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return ("SURVIVED" if code == PASSED else "killed"), (lines or [f"pytest ended with {code}"])[0]


def end_runs() -> None:
    """End what runs; the threads that wait for it go on."""
    for pid in list(_running):
        _kill(pid)


def _kill(pid: int) -> None:
    """With the processes that its tests have started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _file(test: str) -> str:
    return test.partition("::")[0]


def _pytest(tree: Path, tests: Sequence[str], limit_s: float, more: dict[str, str]) -> tuple[int | None, str]:
    """The exit code, or None if there was no end in time, and the end of what pytest says."""
    names, said = tree / ".mutants-tests", tree / ".mutants-output"
    names.write_text("\n".join(tests), encoding="utf-8")
    # The tree's own package before the one that is installed; then the plugin, which a toy tree lacks.
    path = os.pathsep.join((str(tree), str(Path(__file__).parents[2])))
    # Without byte code: that of another mutant of the same second and size would be taken for this one's.
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **more}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    with said.open("wb") as output:
        started = subprocess.Popen(
            # Names of tests are relative to the root, which pytest would else look for above the tree, too.
            [*command, f"--rootdir={tree}", "-p", "tests.mutants.plugin", f"@{names}"],
            cwd=tree, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        _running.add(started.pid)
        code: int | None = None
        try:
            code = started.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if started.poll() is None:
                _kill(started.pid)
                started.wait()
            _running.discard(started.pid)
    return code, said.read_text(encoding="utf-8", errors="replace")[-3000:]
