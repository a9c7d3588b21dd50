"""Asking one of our processes how it fares, over its telemetry port. Knows nothing of what the answer is used for."""

from __future__ import annotations

import http.client
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: The paths answer from a thread of their own in milliseconds; longer means that the process hangs or is gone.
PROBE_TIMEOUT_S: Final = 2.0
#: Longest body that is read; /metrics of a worker has some 50 kB.
MAX_BODY: Final = 4 << 20
#: Where a server listens on every address, it is asked on loopback.
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@dataclass(frozen=True)
class Probed:
    """status: of HTTP; 0: no answer, and body says why."""

    status: int
    body: str

    @property
    def ok(self) -> bool:
        """Whether the answer is yes."""
        return self.status == 200


def read_port(port_file: Path) -> int | None:
    """What telemetry.port_file holds; None while there is none."""
    try:
        return int(port_file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def probe(port: int, path: str, host: str = "127.0.0.1") -> Probed:
    """Ask; never raises. Proxies that the environment names are not for this machine's own processes."""
    connection = http.client.HTTPConnection(_ANY.get(host, host), port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return Probed(answer.status, answer.read(MAX_BODY).decode("utf-8", "replace"))
    except (OSError, ValueError, http.client.HTTPException) as error:
        return Probed(0, f"does not answer ({str(error) or type(error).__name__})")
    finally:
        connection.close()
