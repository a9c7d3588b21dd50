"""`--parallel N`: tests run in N forks of the pytest that has collected them.

To import torch and collect takes a process twenty seconds of a core, and a fork milliseconds. Forks get whole files, in
their order; one that finds none left gets half of what another has left. Every other fork begins with the files whose
tests use a broker, and wait for it: meanwhile the others compute.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import traceback
from collections import deque
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Final
from warnings import WarningMessage

import pytest

from relaygr_stream.ops.children import end_with_parent

#: What a fork knows of: the item that runs, and the next one, for which pytest keeps fixtures.
AHEAD: Final = 2
#: The fixture of tests that use a broker.
BROKERS: Final = "brokers"


class Fork:
    """A process that runs tests, seen from the one that collected them. Each item is its index in the session."""

    def __init__(self, session: pytest.Session, *, waits: bool) -> None:
        self.waits = waits
        self.link, theirs = Pipe()
        self.told = deque[int]()
        self.left = deque[int]()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _run(session, theirs)
        theirs.close()

    def ended(self) -> int:
        """Its exit code, or minus the signal."""
        self.link.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Parallel:
    """A plugin: pytest's loop over the items, on so many forks."""

    def __init__(self, forks: int) -> None:
        self._number = forks
        self._computing, self._waiting = deque[deque[int]](), deque[deque[int]]()
        self._forks: dict[object, Fork] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest's own says why nothing runs
        if reporter := session.config.pluginmanager.get_plugin("terminalreporter"):
            reporter.showfspath = False  # results come from several files at a time
        for _, file in groupby(range(len(session.items)), lambda item: session.items[item].path):
            items = deque(file)
            waits = any(BROKERS in getattr(session.items[item], "fixturenames", ()) for item in items)
            (self._waiting if waits else self._computing).append(items)
        gc.freeze()  # what is shared stays so
        try:
            for number in range(self._number):
                self._fork(session, waits=bool(number % 2))
            while self._forks:
                for link in wait([fork.link for fork in self._forks.values()]):
                    self._hear(session, self._forks[link])
        finally:
            for fork in self._forks.values():  # the loop was broken off
                os.kill(fork.pid, signal.SIGINT)
                fork.ended()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _fork(self, session: pytest.Session, *, waits: bool) -> None:
        fork = Fork(session, waits=waits)
        self._forks[fork.link] = fork
        for _ in range(AHEAD):
            self._tell(session, fork)

    def _tell(self, session: pytest.Session, fork: Fork) -> None:
        """The next item, or that there is none."""
        item: int | None = None
        if not (session.shouldfail or session.shouldstop):
            if not fork.left:
                files = (self._waiting or self._computing) if fork.waits else (self._computing or self._waiting)
                fork.left = files.popleft() if files else self._half()
            if fork.left:
                fork.told.append(item := fork.left.popleft())
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended
            fork.link.send(item)

    def _half(self) -> deque[int]:
        most = max((fork.left for fork in self._forks.values()), key=len)
        half = [most.pop() for _ in range((len(most) + 1) // 2)]
        return deque(reversed(half))

    def _hear(self, session: pytest.Session, fork: Fork) -> None:
        hook = session.config.hook
        try:
            kind, said = fork.link.recv()
        except (EOFError, ConnectionResetError):
            kind, said = "end", None
        if kind == "done":
            fork.told.popleft()
            self._tell(session, fork)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=said)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=said)
        else:
            del self._forks[fork.link]
            code = fork.ended()
            if fork.told:
                self._died(session, fork, f"the process that ran it ended with {code}")

    def _died(self, session: pytest.Session, fork: Fork, why: str) -> None:
        """A test ended its process: another one does what is left."""
        item = session.items[fork.told.popleft()]
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
        session.config.hook.pytest_runtest_logreport(report=report)
        self._computing.extend(file for file in (fork.told, fork.left) if file)
        self._fork(session, waits=fork.waits)


class Told:
    """A plugin of a fork: it tells what pytest's process has to know."""

    def __init__(self, config: pytest.Config, link: Connection) -> None:
        self._config, self._link = config, link

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._link.send(("report", data))

    def pytest_warning_recorded(self, warning_message: WarningMessage, when: str, nodeid: str, location: Any) -> None:
        plain = WarningMessage(
            str(warning_message.message), warning_message.category, warning_message.filename, warning_message.lineno
        )
        said = {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location}
        self._link.send(("warning", said))


def _run(session: pytest.Session, link: Connection) -> None:
    """What a fork does. It ends with its parent, and without pytest's own end, which is the parent's."""
    code = 1
    try:
        end_with_parent()
        random.seed()
        manager = session.config.pluginmanager
        capture: Any = manager.get_plugin("capturemanager")
        capture.stop_global_capturing()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what pytest says, the parent says
        capture.start_global_capturing()  # into files of its own
        capture.suspend_global_capture()
        manager.register(Told(session.config, link))
        item = link.recv()
        while item is not None:
            following = link.recv()
            session.config.hook.pytest_runtest_protocol(
                item=session.items[item], nextitem=None if following is None else session.items[following]
            )
            link.send(("done", None))
            item = following
        code = 0
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        session._setupstate.teardown_exact(None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
