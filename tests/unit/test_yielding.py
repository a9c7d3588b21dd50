"""A session's niceness while its leader starts, and afterwards; in real processes, because it is the kernel's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from relaygr_stream.yielding import PAUSE_S, SESSION, Yielding

pytestmark = pytest.mark.skipif(not SESSION.exists(), reason="this kernel has no autogroups")

#: `say` writes the niceness on a line of its own; `steps` are run where it stands.
PROGRAM = """
import os, sys, time
from pathlib import Path
from relaygr_stream.yielding import SESSION, Yielding
def say(): print(SESSION.read_text().split()[-1], flush=True)
def be(nice): SESSION.write_text(str(nice))
"""


def said(steps: str) -> list[int]:
    """What a process says that leads a session and runs these steps."""
    command = [sys.executable, "-c", PROGRAM + steps]
    done = subprocess.run(command, start_new_session=True, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    return [int(line) for line in done.stdout.split()]


def test_it_is_nice_until_the_end_which_may_come_twice() -> None:
    assert said("say(); it = Yielding(7); say(); it.end(); say(); it.end(); say()") == [0, 7, 0, 0]


def test_it_goes_back_to_what_was_set_before() -> None:
    assert said("be(3); it = Yielding(7); say(); it.end(); say()") == [7, 3]


@pytest.mark.parametrize("steps", ["be(9); it = Yielding(7)", "it = Yielding(0)"])
def test_what_is_nice_already_or_need_not_be_is_left_alone(steps: str) -> None:
    before, after, end = said(f"{steps}; say(); be(2); say(); it.end(); say()")
    assert (before, after, end) == (9 if "be(9)" in steps else 0, 2, 2)


def test_it_ends_by_itself() -> None:
    assert said("it = Yielding(7, most_s=0.01); it._timer.join(); say()") == [0]


def test_a_session_that_others_are_in_is_left_alone() -> None:
    assert said("be(3); forked = os.fork(); os.wait() if forked else Yielding(7); say()") == [3, 3]


def test_a_process_whose_session_has_no_niceness_starts_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those that no session was made for, as in a container's or a CI's first: the file is there and empty."""
    session = tmp_path / "autogroup"
    session.write_text("")
    monkeypatch.setattr("relaygr_stream.yielding.SESSION", session)
    monkeypatch.setattr("os.getsid", lambda pid: os.getpid())
    Yielding(7).end()
    assert session.read_text() == ""


def test_a_kernel_that_is_busy_with_others_changes_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes one change in 100 ms from those without privileges, which a test may have."""
    asked: list[int] = []
    refused = 3

    def change(nice: int) -> bool:
        asked.append(nice)
        return len(asked) % (refused + 1) == 0

    monkeypatch.setattr("relaygr_stream.yielding._session_nice", lambda: 0)
    monkeypatch.setattr("relaygr_stream.yielding._set_session_nice", change)
    it = Yielding(7)
    threads = [threading.Thread(target=it.end) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == [7] * (refused + 1) + [0] * (refused + 1)


def test_where_the_kernel_never_takes_it_the_start_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("relaygr_stream.yielding.PATIENCE_S", PAUSE_S)
    monkeypatch.setattr("relaygr_stream.yielding._session_nice", lambda: 0)

    def refuse(nice: int) -> bool:
        asked.append(nice)
        return False

    monkeypatch.setattr("relaygr_stream.yielding._set_session_nice", refuse)
    Yielding(7).end()
    assert set(asked) == {7}
