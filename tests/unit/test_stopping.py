"""What owns something is cancelled by the first signal, and again where the cancellation got lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relaygr_stream.ops import stopping
from relaygr_stream.ops.stopping import run_until_stopped
from tests.waiting import WITHIN_S


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_cancels_and_cleans_up(
    number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append("up")

    with pytest.raises(SystemExit) as ended:
        run_until_stopped(work())
    assert (ended.value.code, cleaned) == (code, ["up"])
    assert capsys.readouterr().err == "stopped; nothing is left behind\n"


def test_a_cancellation_that_somebody_lost_is_not_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "AGAIN_S", 0.01)
    lost: list[int] = []

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if lost:
                    raise
                lost.append(1)

    with pytest.raises(SystemExit):
        run_until_stopped(work(), line="stopped", exit_code=0)
    assert lost == [1]


def test_what_ends_by_itself_gives_its_result() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert run_until_stopped(work()) == 7


def test_a_cancellation_of_its_own_is_no_stop() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_until_stopped(work())


def test_a_signal_within_the_execution_of_a_text_does_not_kill_the_process_at_its_end(tmp_path: Path) -> None:
    """Imports execute texts (dataclasses, named tuples). CPython remembers a KeyboardInterrupt that passes through one,
    and `python -m` dies of SIGINT in the end, whatever became of it."""
    (tmp_path / "interrupted.py").write_text("""
import os, signal
from relaygr_stream.cli.main import main
from relaygr_stream.ops.stopping import interruptible

@main.command()
def interrupted():
    with interruptible():
        exec("os.kill(os.getpid(), signal.SIGINT)")

main(["interrupted"])
""")
    line = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=WITHIN_S, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "stopped\n")
