"""What tests fork is as what its command line begins."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from relaygr_stream.errors import RelayError
from relaygr_stream.ops.children import Child
from tests import forks
from tests.waiting import until, until_blocking

pytestmark = [pytest.mark.stack, pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux alone")]

#: A parent of a trigger whose process id it prints.
PARENT = """
import sys, time
from pathlib import Path
from relaygr_stream.ops.children import Child
from tests.forks import forking
with forking():
    child = Child("trigger", ["trigger", "--bootstrap", sys.argv[1]], Path(sys.argv[2]))
    while not child.healthy():
        time.sleep(0.05)
    print(child.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a broker that takes connections and never says a word: whoever asks it waits."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def test_a_fork_is_as_the_process_of_its_command(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # as torch does where a test before has compiled
    seen = [await what_is_seen(silent, tmp_path, forked=True)]
    monkeypatch.setenv("PYTHONDEVMODE", "")  # the interpreter reads it at its start
    seen.append(await what_is_seen(silent, tmp_path, forked=False))
    assert seen[0] == seen[1]


async def what_is_seen(bootstrap: str, folder: Path, *, forked: bool) -> list[object]:
    bad = Child("bad", ["trigger", "--set=no.such=1"], folder)
    refused = await bad.wait()
    child = Child("trigger", ["trigger", f"--bootstrap={bootstrap}"], folder)
    process = psutil.Process(child.pid)
    assert (process.ppid() != os.getpid()) == forked
    await until(child.healthy, "healthy")
    child.terminate()
    stopped = await child.wait()
    child = Child("trigger", ["trigger", f"--bootstrap={bootstrap}"], folder)
    await until(child.healthy, "healthy")
    process = psutil.Process(child.pid)
    proc = Path(f"/proc/{child.pid}")
    about = [
        [part for part in process.cmdline() if part],
        process.cwd(),
        os.getsid(child.pid) == child.pid,
        [(proc / "fd" / number).readlink() for number in "012"],
        [line for line in (proc / "status").read_text(encoding="utf-8").splitlines() if re.match("Sig[^Q]", line)],
        {key: value for key, value in process.environ().items() if not key.startswith(("PYTHON", *forks.READ_LATER))},
    ]
    child.kill()
    assert not process.is_running()
    return [*about, refused, bad.log_tail(), stopped, child.exit_code]


def test_forks_end_with_the_parent(silent: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, silent, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        fork = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    until_blocking(lambda: not fork.is_running(), "ended")
    assert '"signal":"SIGTERM"' in (log := (tmp_path / "trigger.log").read_text(encoding="utf-8")), log


async def test_a_killed_fork_has_the_signals_code(silent: str, tmp_path: Path) -> None:
    child = Child("worker", ["worker", f"--bootstrap={silent}"], tmp_path)
    os.kill(child.pid, signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL


async def test_where_the_process_that_is_forked_hangs_it_is_said_and_all_end(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with forks.forking():
        child = Child("worker", ["worker", f"--bootstrap={silent}"], tmp_path)
        process = psutil.Process(child.pid)
        server = process.parent()
        assert server is not None
        server.suspend()
        monkeypatch.setattr(forks, "FORK_TIMEOUT_S", 0.2)
        late = Child("late", ["worker", f"--bootstrap={silent}"], tmp_path)
        with pytest.raises(RelayError, match="nothing was forked within"):
            late.kill()
    until_blocking(lambda: not process.is_running(), "ended")
    for each in (child, late):
        with pytest.raises(RelayError, match="has ended"):
            await each.wait()
