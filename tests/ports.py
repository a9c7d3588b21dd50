"""Ports for what a test starts on stated ones."""

from __future__ import annotations

from relaygr_stream.ops.brokers.distribution import free_ports, is_free


def ports_in_a_row(count: int) -> int:
    """The first of so many free ports, each of which stays free of connections that others make."""
    while True:
        (first,) = free_ports(1)
        if all(is_free(port) for port in range(first + 1, first + count)):
            return first
