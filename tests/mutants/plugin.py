"""A plugin of pytest for runs on mutants.

Hypothesis finds the same examples each time, and shrinks none: how small the example can be that a mutant fails on is
nobody's question, and takes minutes. With MUTANTS_TRACE (a file to write) and MUTANTS_FILES (sources, separated by
the system's path separator) it notes for each test how long it takes and which lines of these files it runs, on
every thread of the process; child processes are not seen.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, settings

if TYPE_CHECKING:
    from _typeshed import TraceFunction


def pytest_configure(config: pytest.Config) -> None:
    """Over the profile that tests/conftest.py has loaded by now."""
    settings.register_profile("mutants", settings(), derandomize=True, phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutants")
    if "MUTANTS_TRACE" in os.environ:
        config.pluginmanager.register(_Lines())


class _Lines:
    """What each test runs of the files."""

    def __init__(self) -> None:
        self._files = {name: set[int]() for name in os.environ["MUTANTS_FILES"].split(os.pathsep)}
        self._tests: dict[str, dict[str, object]] = {}

    def _call(self, frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        lines = self._files.get(frame.f_code.co_filename)
        if lines is None:
            return None

        def on_line(frame: FrameType, event: str, argument: object) -> TraceFunction:
            if event == "line":
                lines.add(frame.f_lineno)
            return on_line

        return on_line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began = time.perf_counter()
        sys.settrace(self._call)
        threading.settrace(self._call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            ran = {name: sorted(lines) for name, lines in self._files.items()}
            self._tests[item.nodeid] = {"seconds": time.perf_counter() - began, "lines": ran}
            for lines in self._files.values():
                lines.clear()

    def pytest_sessionfinish(self) -> None:
        Path(os.environ["MUTANTS_TRACE"]).write_text(json.dumps(self._tests), encoding="utf-8")
