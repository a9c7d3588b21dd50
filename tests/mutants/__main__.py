"""Make defects in modules, one at a time, each in a copy of the tree, and say which of them the unit tests let pass.

Never touches the tree itself. A defect counts as killed when a unit test that runs its line fails or does not end in
time. Exits 1 where the share that was killed is below --at-least.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from rich.console import Console
from rich.table import Table

from tests.mutants.operators import mutations
from tests.mutants.runs import Clean, Mutant, Verdict, copy_tree, end_runs, judge, run_clean
from tests.mutants.selection import candidates

ROOT: Final = Path(__file__).parents[2]
_HUNK: Final = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", re.MULTILINE)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT, package: str = "relaygr_stream") -> int:
    """The command line; returns the exit code."""
    options, root = _parser().parse_args(arguments), root.resolve()
    console, started = Console(highlight=False, markup=False, emoji=False, soft_wrap=True), time.monotonic()
    chosen = _chosen(root, package, options)
    console.print(f"{len(chosen)} mutants of {len({mutant.module for mutant in chosen})} modules")
    if options.list:
        for mutant in chosen:
            console.print(_line(mutant))
    if options.list or not chosen:
        return 0
    with tempfile.TemporaryDirectory(prefix="relaygr-mutants-") as folder:
        verdicts = _verdicts(console, root, package, Path(folder).resolve(), chosen, options)
    score = _report(console, chosen, verdicts)
    console.print(f"score {score:.0f} % in {time.monotonic() - started:.0f} s")
    return 0 if score >= options.at_least else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="files or folders, such as engine/admission.py")
    parser.add_argument(
        "--since", metavar="COMMIT", help="only lines changed since then; without MODULE, of all modules"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="so many mutants, by chance (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of that chance (default: 1)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time, each in a copy of its own (default: 2)")
    parser.add_argument(
        "--tests", nargs="+", type=Path, metavar="FILE", help="test files to take instead of those found"
    )
    parser.add_argument("--at-least", type=float, default=0.0, metavar="PERCENT", help="exit 1 with a lower score")
    parser.add_argument("--list", action="store_true", help="print the mutants and run none")
    return parser


def _chosen(root: Path, package: str, options: argparse.Namespace) -> list[Mutant]:
    """Raises SystemExit where a module is not there, or where none is named and no commit either."""
    if not options.modules and options.since is None:
        raise SystemExit("mutants: name modules, such as engine/admission.py, or a commit with --since")
    modules = list[Path]()
    for name in options.modules or ["."]:
        at = next((path.resolve() for path in (root / package / name, root / name) if path.exists()), None)
        if at is None or not at.is_relative_to(root / package):
            raise SystemExit(f"mutants: {name} is no file and no folder of {package}/")
        modules += [path.relative_to(root) for path in (sorted(at.rglob("*.py")) if at.is_dir() else [at])]
    found = [
        Mutant(module, mutation)
        for module in dict.fromkeys(modules)
        for changed in [None if options.since is None else _changed(root, module, options.since)]
        if changed is None or changed
        for mutation in mutations((root / module).read_text(encoding="utf-8"))
        if changed is None or not changed.isdisjoint(range(mutation.first, mutation.last + 1))
    ]
    if options.sample is not None and options.sample < len(found):
        picked = random.Random(options.seed).sample(range(len(found)), options.sample)
        found = [found[index] for index in sorted(picked)]
    return found


def _changed(root: Path, module: Path, commit: str) -> set[int]:
    """Lines of a module, as it is now, that differ from those of a commit. Raises SystemExit for an unknown commit."""
    done = subprocess.run(
        ["git", "diff", "--unified=0", commit, "--", str(module)], cwd=root, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"mutants: --since {commit}: {done.stderr.strip()}")
    return {
        line
        for start, count in _HUNK.findall(done.stdout)
        for line in range(int(start), int(start) + int(count or "1"))
    }


def _verdicts(
    console: Console, root: Path, package: str, folder: Path, chosen: Sequence[Mutant], options: argparse.Namespace
) -> list[Verdict]:
    modules = list(dict.fromkeys(mutant.module for mutant in chosen))
    tests = options.tests or sorted({test for module in modules for test in candidates(root, package, module)})
    if not tests:
        raise SystemExit(
            f"mutants: no file below tests/unit imports {', '.join(map(str, modules))}: name some with --tests"
        )
    trees: SimpleQueue[Path] = SimpleQueue()
    first, *others = (folder / str(number) for number in range(max(1, options.jobs)))
    copy_tree(root, first)
    _check_import(first, package)
    console.print(f"running {len(tests)} test files without a mutant …")
    clean: Clean = run_clean(first, modules, tests)
    for tree in (first, *others):
        if tree is not first:
            shutil.copytree(first, tree)
        trees.put(tree)

    def one(mutant: Mutant) -> Verdict:
        tree, began = trees.get(), time.monotonic()
        try:
            verdict, said = judge(tree, mutant, clean)
        finally:
            trees.put(tree)
        by = f" ({said})" if verdict == "killed" else ""
        console.print(f"{verdict:<11} {time.monotonic() - began:>4.0f} s  {_line(mutant)}{by}")
        return verdict

    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        try:
            return list(pool.map(one, chosen))
        except BaseException:  # Ctrl-C, or a defect of ours: what runs is not waited for
            pool.shutdown(wait=False, cancel_futures=True)
            end_runs()
            raise


def _check_import(tree: Path, package: str) -> None:
    """The tests import the copy's own package; else a mutant would change nothing."""
    where = subprocess.run(
        [sys.executable, "-c", f"import {package}; print({package}.__file__)"],
        cwd=tree, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    if not Path(where).is_relative_to(tree):
        raise SystemExit(f"mutants: the tests would import {where}, not the copy in {tree}")


def _line(mutant: Mutant) -> str:
    before, after = (" ".join(text.split()) for text in (mutant.mutation.before, mutant.mutation.after))
    return f"{mutant.module}:{mutant.mutation.line}: {mutant.mutation.operator}: `{before}` → `{after}`"


def _report(console: Console, chosen: Sequence[Mutant], verdicts: Sequence[Verdict]) -> float:
    """Print what survived, then a line a module; returns the percentage killed."""
    for mutant, verdict in zip(chosen, verdicts, strict=True):
        if verdict != "killed":
            console.print(f"{verdict}: {_line(mutant)}")
    table = Table("module", "mutants", "killed", "not reached", "score", box=None, pad_edge=False, header_style="bold")
    for module in dict.fromkeys(mutant.module for mutant in chosen):
        mine = [verdict for mutant, verdict in zip(chosen, verdicts, strict=True) if mutant.module == module]
        counts = (len(mine), mine.count("killed"), mine.count("NOT REACHED"))
        table.add_row(str(module), *map(str, counts), f"{_score(mine):.0f} %")
    console.print(table)
    return _score(verdicts)


def _score(verdicts: Sequence[Verdict]) -> float:
    return 100.0 * verdicts.count("killed") / len(verdicts)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
