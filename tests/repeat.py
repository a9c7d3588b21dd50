"""Runs the suite again and again beside busy loops, and lists what failed: `make test-repeat N=20 BUSY=2`.

A test that fails once in twenty runs is a defect of the test or of the code; a busy machine finds it sooner.

usage: python -m tests.repeat --times 20 --busy 2 -- PYTEST ARGUMENTS
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def burn(owner: int) -> None:
    """Use a core while the owner lives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, who ends this
    while os.getppid() == owner:
        pass


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """So many processes that only burn processor time; they end with the block, and with this process."""
    loops = [multiprocessing.Process(target=burn, args=(os.getpid(),)) for _ in range(number)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.join()


def run(arguments: list[str], report: Path) -> tuple[int, list[str]]:
    """One run: pytest's exit code, and the tests that failed or had an error."""
    with subprocess.Popen([sys.executable, "-m", "pytest", f"--junit-xml={report}", *arguments]) as pytest:
        try:
            code = pytest.wait()
        except KeyboardInterrupt:
            pytest.wait()  # it was interrupted, too, and ends what it started
            raise
    if not report.exists():
        return code, []
    cases = ET.parse(report).getroot().iter("testcase")
    return code, [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]


def main() -> int:
    """Exit code 1 unless every run was green; 130 after Ctrl-C, with the list of what there was."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("arguments", nargs="*", metavar="PYTEST ARGUMENTS")
    options = parser.parse_args()
    failed: Counter[str] = Counter()
    green = done = 0
    interrupted = False
    with busy_loops(options.busy), tempfile.TemporaryDirectory() as folder:
        try:
            for number in range(1, options.times + 1):
                start = time.monotonic()
                code, names = run(options.arguments, Path(folder, f"{number}.xml"))
                done += 1
                green += code == 0
                # pytest may fail with all its tests passed: what it finds at its end counts, too.
                failed.update(names or ([f"(no test: exit code {code})"] if code else []))
                print(
                    f"run {number} of {options.times}: exit code {code}, {time.monotonic() - start:.0f} s", flush=True
                )
        except KeyboardInterrupt:
            interrupted = True
    print(f"\n{green} of {done} runs green, beside {options.busy} busy loops")
    for name, times in failed.most_common():
        print(f"{times:4d} × {name}")
    return 130 if interrupted else int(green < options.times)


if __name__ == "__main__":
    sys.exit(main())
