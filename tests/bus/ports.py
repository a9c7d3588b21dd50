"""Ports for brokers of the tests' own."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """Ports that nobody listened on just now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
