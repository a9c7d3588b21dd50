"""Asks a process of this package for its health or metrics, over its telemetry port."""

from __future__ import annotations

import http.client
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: A dedicated thread answers in milliseconds; a longer time means that the process hangs or has ended.
PROBE_TIMEOUT_S: Final = 2.0
#: Longest body that is read, in bytes; /metrics of a worker has about 50 kB.
MAX_BODY: Final = 4 << 20
#: A server that listens on every address is asked on loopback.
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@dataclass(frozen=True)
class Probed:
    """An answer. status: the HTTP status; 0: no answer, and body holds the error."""

    status: int
    body: str

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
        return Probed(0, f"does not answer ({str(error) or type(error).__name__})")
    finally:
        connection.close()
