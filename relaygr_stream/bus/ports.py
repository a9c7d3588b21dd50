"""Ports for private brokers, which may be stopped and started again.

Taken from below those that the system hands out: nobody is given one by chance while its broker is down, not even a
client that tries to reach that broker (TCP lets a socket connect to itself).
"""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Final

#: Above the ports that well-known servers use.
FIRST: Final = 10_000
#: Where a system that does not say (macOS) begins to hand out ports: RFC 6335.
HANDED_OUT_FROM: Final = 49_152
#: Fewer to choose from, and two programs would choose the same.
ENOUGH: Final = 1000


def free_ports(count: int, handed_out_from: int | None = None) -> list[int]:
    """Different loopback ports that nobody listens on just now.

    handed_out_from: the first port that the system gives to sockets which name none; None: as this system says.
    Raises OSError if there are not enough.
    """
    end = _handed_out_from() if handed_out_from is None else handed_out_from
    if end - FIRST < ENOUGH:  # a system that hands out nearly all: then by chance it must be
        return _handed_out(count)
    free: list[int] = []
    for port in random.SystemRandom().sample(range(FIRST, end), end - FIRST):
        if len(free) == count:
            break
        if nobody_listens(port):
            free.append(port)
    else:
        raise OSError(f"of the ports {FIRST} to {end - 1}, fewer than {count} are free")
    return free


def nobody_listens(port: int) -> bool:
    """Whether a server could take this loopback port."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _handed_out_from() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return HANDED_OUT_FROM


def _handed_out(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
