"""Connections of strangers: those in excess are closed, and none keeps others out.

The grace period never ends in these tests: whatever waits for it waits for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import pytest

from relaygr_stream.telemetry.listener import BACKLOG, Known, Listener, source_of
from tests.waiting import until

CLIENTS = 20
FOR_EVER = 3600.0
elsewhere = pytest.mark.skipif(sys.platform != "linux", reason="needs 127.0.0.2: Linux has all of 127.0.0.0/8")


async def answer(connection: socket.socket, known: Known) -> None:
    """Read one byte, answer it, close. `?` is never answered."""
    del known
    loop = asyncio.get_running_loop()
    with connection:
        while (byte := await loop.sock_recv(connection, 1)) == b"?":
            pass
        await loop.sock_sendall(connection, byte)


@asynccontextmanager
async def running(listener: Listener) -> AsyncIterator[None]:
    task = asyncio.create_task(listener.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Clients(ExitStack):
    """Opens connections, and closes them at the end."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._to = ("127.0.0.1", listener.port)

    def open(self, source: str = "127.0.0.1", sending: bytes = b"") -> socket.socket:
        client = self.enter_context(socket.create_connection(self._to, timeout=10, source_address=(source, 0)))
        client.sendall(sending)
        client.setblocking(False)
        return client


async def received(client: socket.socket) -> bytes:
    """What the listener sends; b"": it hung up."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.get_running_loop().sock_recv(client, 1)
    return b""


def listening(most: int, grace_s: float = FOR_EVER, silent_s: float = FOR_EVER) -> Listener:
    return Listener("telemetry", "127.0.0.1", 0, answer, most, grace_s, silent_s)


async def test_a_connection_in_excess_is_closed_even_if_serving_it_has_not_begun() -> None:
    listener = listening(most=1)
    with Clients(listener) as clients:
        silent = [clients.open() for _ in range(CLIENTS)]
        async with running(listener):
            for client in silent[:-1]:
                assert await received(client) == b""
        assert await received(silent[-1]) == b""


@elsewhere
async def test_a_flood_from_one_address_keeps_no_other_out() -> None:
    listener = listening(most=16)
    with Clients(listener) as clients:
        flood = [clients.open(sending=b"?" * (each % 2)) for each in range(100)]
        other = clients.open("127.0.0.2")
        async with running(listener):
            hung_up = [asyncio.create_task(received(client)) for client in flood]
            await until(lambda: sum(each.done() for each in hung_up) == len(flood) - 4, "it holds a quarter")
            await asyncio.get_running_loop().sock_sendall(other, b"x")
            assert await received(other) == b"x"
            for each in hung_up:
                each.cancel()


@elsewhere
async def test_a_flood_from_several_addresses_keeps_no_other_out() -> None:
    listener = listening(most=16)
    with Clients(listener) as clients:
        for each in range(200):
            clients.open(f"127.0.0.{2 + each % 6}", sending=b"?" * (each % 2))
        async with running(listener):
            assert await received(clients.open(sending=b"x")) == b"x"


@pytest.mark.parametrize("sending", [b"", b"?"], ids=["say nothing", "never end their request"])
async def test_at_one_address_those_who_do_otherwise_are_not_displaced(sending: bytes) -> None:
    listener = listening(most=16)
    with Clients(listener) as clients:
        async with running(listener):
            other = clients.open(sending=b"" if sending else b"?")
            assert await received(clients.open(sending=b"x")) == b"x"  # so the one before is held by now
            flood = [clients.open(sending=sending) for _ in range(CLIENTS)]
            for client in flood[:-3]:
                assert await received(client) == b""
            await asyncio.get_running_loop().sock_sendall(other, b"y")
            assert await received(other) == b"y"


async def test_a_request_in_the_queue_is_read_before_what_came_behind_it_displaces_it() -> None:
    listener = listening(most=32)
    with Clients(listener) as clients:
        asking = [clients.open(sending=b"x")]
        for _ in range(5):
            for _ in range(40):
                clients.open(sending=b"?")
            asking.append(clients.open(sending=b"x"))
        async with running(listener):
            assert [await received(client) for client in asking] == [b"x"] * len(asking)


async def test_a_stand_still_of_the_loop_loses_no_connection() -> None:
    """The kernel queues what comes meanwhile; beyond its queue, a client tries again a second later."""
    listener = listening(most=8 * BACKLOG)
    with Clients(listener) as clients:
        waiting = [clients.open(sending=b"x") for _ in range(500)]
        async with running(listener):
            assert [await received(client) for client in waiting] == [b"x"] * len(waiting)


async def test_who_says_nothing_is_closed_in_time() -> None:
    listener = listening(most=16, silent_s=0.01)
    with Clients(listener) as clients:
        async with running(listener):
            assert await received(clients.open()) == b""


@elsewhere
@pytest.mark.parametrize(("grace_s", "answered"), [(0.01, b"x"), (FOR_EVER, b"")])
async def test_addresses_with_one_connection_each_have_their_grace(grace_s: float, answered: bytes) -> None:
    listener = listening(most=4, grace_s=grace_s)
    with Clients(listener) as clients:
        first = [clients.open(f"127.0.0.{2 + each}", sending=b"?") for each in range(4)]
        fifth = clients.open(sending=b"x")
        async with running(listener):
            if answered:
                assert await received(first[0]) == b""
            else:  # it is served once one of the others has been
                await asyncio.get_running_loop().sock_sendall(first[2], b"y")
                assert await received(first[2]) == b"y"
            assert await received(fifth) == b"x"


@pytest.mark.parametrize(
    ("address", "source"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("::ffff:192.0.2.7", 1, 0, 0), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
    ],
)
def test_what_counts_as_one_source(address: tuple[object, ...], source: str) -> None:
    assert source_of(address) == source
