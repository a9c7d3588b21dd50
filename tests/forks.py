"""Workers and triggers forked from one process that has made their imports, which were a third of what tests of whole
fleets took. Everything after them runs as in a process begun by its command line, and a fork is one like any other:
of its own session, log and exit code, listed by `ps` under its command, ended with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Final
from unittest import mock

from relaygr_stream.errors import RelayError
from relaygr_stream.ops import children
from relaygr_stream.ops.children import start_process

#: The commands that are forked, and what they import: each imports a part of the last one's.
COMMANDS: Final = ("worker", "trigger")
IMPORTS: Final = (
    "relaygr_stream.cli.main",
    "relaygr_stream.worker.run",
    "relaygr_stream.handover.build",
    "relaygr_stream.trigger.service",
    "uvloop",
)
#: Names of variables that nothing reads as it is imported: a fork takes their values of its own. torch itself sets
#: TORCHINDUCTOR_CACHE_DIR once it compiles.
READ_LATER: Final = ("OTEL_", "PYTEST_", "TESTS_", "TORCHINDUCTOR_")
#: Longest wait of a fetch at the embedded broker. Each consumer would ask it 80 times a second, and a test has a dozen:
#: that was most of what such tests took. With 50, three files of services took 1.4 times the processor time of 200.
SELDOM_MS: Final = 150
#: Importing takes seconds, and a fork milliseconds: a server that is silent for longer hangs.
FORK_TIMEOUT_S: Final = children.START_TIMEOUT_S
#: What a message has at most, in bytes; a command line has a thousand. `ps` shows as many of them.
MAX_MESSAGE: Final = 1 << 15
SHOWN: Final = 2000
ENDED: Final = "the process that forks workers has ended, and its forks with it"
PR_SET_NAME: Final = 15  # <linux/prctl.h>

State = tuple[Mapping[str, str], str, frozenset[int]]


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Fork every `Child` of the block that runs `relaygr worker` or `relaygr trigger`, on Linux.

    The process that is forked begins with the first of them. What begins with another environment, in another network
    namespace or on other cores than the block did runs as a command of its own, like everything outside the block.
    """
    if sys.platform != "linux":
        yield
        return
    forks = _Forks()
    try:
        with mock.patch.object(children, "start_process", forks.start):
            yield
    finally:
        forks.close()


class _Forks:
    """The process that is forked, seen from its parent."""

    def __init__(self) -> None:
        self._state = _state(children.environment())
        self._server: subprocess.Popen[bytes] | None = None
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> children.Process:
        forked = command[:4] == children.relaygr_command((), Path())[:4] and command[4] in COMMANDS
        if not forked or _state(environment) != self._state:
            return start_process(command, environment, log)
        if self._server is None:
            self._server = self._begin()
        if self._server.poll() is not None:  # it said why, or somebody killed it
            return start_process(command, environment, log)
        link, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {name: value for name, value in environment.items() if name.startswith(READ_LATER)}
        message = json.dumps([own, str(Path.cwd()), list(command)]).encode()
        with far:
            socket.send_fds(self._control, [message], [log.fileno(), far.fileno()])
        return _Forked(link)

    def _begin(self) -> subprocess.Popen[bytes]:
        with self._theirs:
            return subprocess.Popen(
                [sys.executable, "-P", __file__, str(self._theirs.fileno()), " " * SHOWN],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=dict(self._state[0]),
                pass_fds=[self._theirs.fileno()],
                start_new_session=True,
            )

    def close(self) -> None:
        self._theirs.close()
        self._control.close()  # on which it ends, and its forks get SIGTERM
        if self._server is None:
            return
        try:
            self._server.wait(FORK_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it hangs
            self._server.kill()
            self._server.wait()


class _Forked:
    """As much of subprocess.Popen as `Child` needs, for a process whose parent tells of its end."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._pid = 0
        self._code: int | None = None

    @property
    def pid(self) -> int:
        """Process id; waits for the fork."""
        if not self._pid:
            self._hear(FORK_TIMEOUT_S)
        if not self._pid:
            raise RelayError(f"nothing was forked within {FORK_TIMEOUT_S:.0f} s")
        return self._pid

    def poll(self) -> int | None:
        while self._code is None and self._hear(0):
            pass
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        pid = self.pid
        if self.poll() is None:
            self._hear(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _hear(self, timeout_s: float | None) -> bool:
        """Take what was said within the time, from any thread; False: nothing."""
        waiting = select.poll()
        with self._lock:
            if self._code is not None:
                return False
            if self._link.fileno() < 0:
                raise RelayError(ENDED)
            waiting.register(self._link, select.POLLIN)
        if not waiting.poll(None if timeout_s is None else timeout_s * 1e3):
            return False
        with self._lock, contextlib.suppress(BlockingIOError):  # another thread was first
            if self._code is None:
                said = self._link.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)
                if not said:
                    self._link.close()
                    raise RelayError(ENDED)
                if self._pid:
                    self._code = int(said)
                    self._link.close()
                else:
                    self._pid = int(said)
        return True


def _state(environment: Mapping[str, str]) -> State:
    """What a process takes over from its parent, and reads as it begins."""
    names = {name: value for name, value in environment.items() if not name.startswith(READ_LATER)}
    return names, os.readlink("/proc/thread-self/ns/net"), frozenset(os.sched_getaffinity(0))  # noqa: PTH115


# ---- the process that is forked ----


def _serve(control: socket.socket) -> list[str]:
    """Fork for each message, and tell of the ends. Returns in each fork, with its command line."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not control:
                pid, link = key.data
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with link, contextlib.suppress(OSError):  # nobody wants to know
                    link.send(str(code).encode())
                selector.unregister(key.fileobj)
                os.close(key.fd)
                continue
            message, (log, far), _, _ = _received(control)
            link = socket.socket(fileno=far)
            if pid := os.fork():
                with contextlib.suppress(OSError):
                    link.send(str(pid).encode())
                os.close(log)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, link))
                continue
            for other in (link, control, *(other.data[1] for other in selector.get_map().values() if other.data)):
                other.close()
            for other in selector.get_map().values():
                if other.data:
                    os.close(other.fd)
            selector.close()
            read: tuple[dict[str, str], str, list[str]] = json.loads(message)
            own, folder, command = read
            os.environ.update(own)
            _become(command, folder, log)
            return command


def _received(control: socket.socket) -> tuple[bytes, list[int], int, object]:
    received = socket.recv_fds(control, MAX_MESSAGE, 2)
    if not received[0]:
        os._exit(0)  # the parent has ended
    return received


def _become(command: list[str], folder: str, log: int) -> None:
    """What subprocess.Popen does between fork and exec, and what exec does for `ps`."""
    os.setsid()
    children.end_with_parent()
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.chdir(folder)
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"relaygr {command[4]}".encode())
    start, end = map(int, Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[45:47])
    shown = b"\0".join(map(os.fsencode, command))
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, shown, min(len(shown), end - start - 1))


def _import() -> None:
    """What is forked has no thread and no device, and draws no random numbers."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # as workers do
    for name in IMPORTS:
        import_module(name)
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
    setattr(import_module("relaygr_stream.bus.embedded"), "EMBEDDED_FETCH_WAIT_MS", SELDOM_MS)  # noqa: B010
    if not (first := os.fork()):  # OpenBLAS ends its threads before a fork
        os._exit(0)
    os.waitpid(first, 0)
    # A thread that was joined may be listed for a moment more.
    until = time.monotonic() + FORK_TIMEOUT_S
    while (threads := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < until:  # noqa: PTH208
        time.sleep(0.001)
    random = "numpy.random" in sys.modules  # drawn from by all forks alike
    if threads > 1 or random or import_module("torch").cuda.is_initialized():
        sys.exit(f"cannot be forked: {threads} threads, numpy.random {random}, or an initialized device")
    gc.collect()
    gc.freeze()  # what is shared stays so


if __name__ == "__main__":
    _import()
    with socket.socket(fileno=int(sys.argv[1])) as _control:
        sys.argv[1:] = _serve(_control)[4:]
    runpy.run_module("relaygr_stream", run_name="__main__", alter_sys=True)
