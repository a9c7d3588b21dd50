"""`relaygr` processes as children of a demo, a benchmark or a test: started, asked for health and metrics, stopped with
their parent."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Protocol

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from relaygr_stream.errors import RelayError
from relaygr_stream.settings.files import private_file, write_private
from relaygr_stream.settings.load import FIELDS, RETIRED
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.section import ENV_PREFIX

#: Loading torch and a model takes seconds on a free machine, and several times as long if three processes share two
#: cores.
START_TIMEOUT_S: Final = 90.0
#: Draining takes milliseconds; if a broker is away, at most the children's own limit of 10 s.
STOP_TIMEOUT_S: Final = 15.0
PR_SET_PDEATHSIG: Final = 1  # <linux/prctl.h>
LOG_TAIL_LINES: Final = 12
#: A dedicated thread answers in milliseconds; a longer time means that the process hangs or has ended.
PROBE_TIMEOUT_S: Final = 2.0
#: Longest body that is read, in bytes; /metrics of a worker has about 50 kB.
MAX_BODY: Final = 4 << 20
#: A server that listens on every address is asked on loopback.
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class Process(Protocol):
    """A process that was started: these as those of subprocess.Popen."""

    @property
    def pid(self) -> int: ...  # noqa: D102
    def poll(self) -> int | None: ...  # noqa: D102
    def wait(self, timeout: float | None = None) -> int: ...  # noqa: D102
    def send_signal(self, number: int, /) -> None: ...  # noqa: D102
    def kill(self) -> None: ...  # noqa: D102


def start_process(command: Sequence[str], environ: Mapping[str, str], log: IO[bytes]) -> Process:
    """Run a command in a session of its own: Ctrl-C on the terminal reaches only the parent, which stops its children.

    log: takes what it prints. Raises OSError where the system starts no process.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env=environ,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=end_with_parent,  # noqa: PLW1509
    )


def environment() -> dict[str, str]:
    """Of children. The settings passed on already include the environment's, which would override them there."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}


class Child:
    """One `relaygr` process, with its log in `folder`. module: what runs instead of the `relaygr` command."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path, module: str = "relaygr_stream") -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._port_file = folder / f"{name}.port"
        with private_file(self.log) as log:
            self._process = start_process(relaygr_command(arguments, self._port_file, module), environment(), log)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative if killed by a signal; None while it runs."""
        return self._process.poll()

    async def wait_ready(self) -> None:
        """Return when the process is ready. Raises RelayError, with the end of its log, if it ends or is too late."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.exit_code is not None:
                raise RelayError(f"{self.name} ended with exit code {self.exit_code} at its start:\n{self.log_tail()}")
            if await asyncio.to_thread(self.ready):
                return
            await asyncio.sleep(0.1)
        raise RelayError(f"{self.name} was not ready within {START_TIMEOUT_S:.0f} s:\n{self.log_tail()}")

    def metrics(self) -> str:
        """The text of /metrics; "" if the process does not answer."""
        answer = self.ask("/metrics")
        return answer.body if answer.ok else ""

    def samples(self) -> list[Sample]:
        """What /metrics states: one sample for each metric and set of labels; none if the process does not answer."""
        return [sample for family in text_string_to_metric_families(self.metrics()) for sample in family.samples]

    def terminate(self) -> None:
        """Send SIGTERM, on which it drains and ends."""
        if self.exit_code is None:
            self._process.send_signal(signal.SIGTERM)

    def healthy(self) -> bool:
        """Whether /healthz answers 200."""
        return self.ask("/healthz").ok

    def ready(self) -> bool:
        """Whether /readyz answers 200."""
        return self.ask("/readyz").ok

    def kill(self) -> None:
        """Send SIGKILL, like a crash, and wait."""
        self._process.kill()
        self._process.wait()

    async def wait(self) -> int:
        """Wait for its end and return its exit code; after STOP_TIMEOUT_S it is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
        self.kill()
        return self._process.wait()

    def log_tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def ask(self, path: str) -> Probed:
        """GET a path from its telemetry port."""
        port = read_port(self._port_file)
        return Probed(0, "has no port yet") if port is None else probe(port, path)


async def stop_all(children: Sequence[Child]) -> dict[str, int]:
    """Terminate all and wait for all; returns their exit codes by name."""
    for child in children:
        child.terminate()
    codes = await asyncio.gather(*(child.wait() for child in children))
    return {child.name: code for child, code in zip(children, codes, strict=True)}


def write_settings(file: Path, settings: Settings) -> str:
    """Write all settings as TOML, for children that run with exactly these; returns the file's name for --config."""
    lines = []
    sections = msgspec.to_builtins(settings)  # JSON's scalars are valid TOML
    scenarios = {f"scenario.{each.pop('name')}": each for each in sections.pop("scenarios")}
    for each in scenarios.values():
        if each["served_by"]:
            del each["min_workers"]  # it has no workers
    del sections["scenario"], sections["fleet"]
    for section, table in (sections | scenarios).items():
        lines.append(f"[{section}]")
        for name, value in table.items():
            key, of_tls = f"{section}.{name}", name.startswith("tls_") and getattr(settings.tls, name[4:], None)
            is_set = key in RETIRED and value not in (msgspec.to_builtins(RETIRED[key].default), of_tls)
            if section in scenarios or key in FIELDS or is_set:
                lines.append(f"{name} = {msgspec.json.encode(value).decode()}")
    write_private(file, "\n".join(lines) + "\n")  # it holds the secrets
    return str(file)


def relaygr_command(arguments: Sequence[str], port_file: Path, module: str = "relaygr_stream") -> list[str]:
    """The command line of `relaygr ARGUMENTS…` with a file for its telemetry port."""
    return [
        *(sys.executable, "-P", "-m", module, *arguments),
        *("--set", f"telemetry.port_file={port_file}"),
    ]


def end_with_parent() -> None:
    """For preexec_fn: the child gets SIGTERM, drains and ends if its parent is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


# ---- asking a process, over its telemetry port ----


@dataclass(frozen=True)
class Probed:
    """An answer. status: the HTTP status; 0: no answer, and body holds the error. refused: nothing listens there."""

    status: int
    body: str
    refused: bool = False

    @property
    def ok(self) -> bool:
        """Whether the status is 200."""
        return self.status == 200


def read_port(port_file: Path) -> int | None:
    """The port in the file telemetry.port_file; None if there is none yet."""
    try:
        return int(port_file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def probe(port: int, path: str, host: str = "127.0.0.1") -> Probed:
    """GET a path from a process on this machine; never raises. Proxies named by the environment are not used."""
    connection = http.client.HTTPConnection(_ANY.get(host, host), port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return Probed(answer.status, answer.read(MAX_BODY).decode("utf-8", "replace"))
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = f"does not answer ({str(error) or type(error).__name__})"
        return Probed(0, reason, isinstance(error, ConnectionRefusedError))
    finally:
        connection.close()
