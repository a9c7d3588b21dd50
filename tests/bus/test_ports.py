"""Ports that stay a broker's while it is down."""

from __future__ import annotations

import socket

import pytest

from relaygr_stream.ops.brokers.distribution import FIRST_PORT, MIN_PORTS, free_ports


def listen(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def test_they_are_free_and_none_is_ever_handed_out() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    for port in ports:
        listen(port).close()
    handed_out = [listen(0) for _ in range(50)]
    assert max(ports) < min(each.getsockname()[1] for each in handed_out)
    for each in handed_out:
        each.close()


def test_where_somebody_listens_is_not_free() -> None:
    (taken,) = free_ports(1, FIRST_PORT + MIN_PORTS)
    with listen(taken), pytest.raises(OSError, match="of the ports 10000 to 10999, fewer than 1000 are free"):
        free_ports(MIN_PORTS, FIRST_PORT + MIN_PORTS)


def test_a_system_that_hands_out_nearly_all_ports_is_asked_for_some() -> None:
    ports = free_ports(3, FIRST_PORT + MIN_PORTS - 1)
    assert len(set(ports)) == 3
