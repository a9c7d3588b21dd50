"""Those who are no workers of this fleet, or not the ones they say: they get and see nothing, and hold up nobody."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from relaygr_stream.handover import connection, service
from relaygr_stream.handover.certificates import Networks
from relaygr_stream.handover.channel import PeerError
from relaygr_stream.handover.connection import connect
from relaygr_stream.handover.wire import HEADER, Offer
from relaygr_stream.settings.worker import Handover as HandoverSettings
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.wire.messages import WorkerStatus
from tests.unit.engine.worlds import history
from tests.unit.handover.peers import ALL, NETWORKS, SECRET, Peer, connected, credentials, peers, status
from tests.waiting import until

USERS = 6


def port_of(peer: Peer) -> int:
    return int(peer.handover.address.rpartition(":")[2])


@asynccontextmanager
async def stream_to(peer: Peer, **options: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(peer), **options)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


class Relay:
    """A man in the middle: passes bytes on between two workers, and keeps them."""

    def __init__(self, to: Peer) -> None:
        self.seen = bytearray()
        self.tasks: list[asyncio.Task[None]] = []
        self._to = to

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        try:
            async with stream_to(self._to) as (theirs, onward):
                back = asyncio.create_task(self._pump(theirs, writer))
                await self._pump(reader, onward)
                back.cancel()
                await asyncio.gather(back, return_exceptions=True)
        finally:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                self.seen += data
                writer.write(data)
                await writer.drain()


@asynccontextmanager
async def relayed(to: Peer) -> AsyncIterator[tuple[Relay, str]]:
    relay = Relay(to)
    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield relay, "{}:{}".format(*server.sockets[0].getsockname())
    finally:
        server.close()
        for task in relay.tasks:
            task.cancel()
        await asyncio.gather(*relay.tasks, return_exceptions=True)


def named(state: WorkerStatus, name: str) -> WorkerStatus:
    return msgspec.structs.replace(state, name=name)


async def test_a_worker_relayed_under_another_name_is_refused() -> None:
    async with peers() as (old, new), relayed(old) as (relay, address):
        new.known = {"evil": named(status(old, address=address), "evil")}
        new.handover.lanes_changed(ALL, ())
        await until(lambda: new.total("failed", way="taken") > 0)
        assert relay.seen, "nothing was relayed"
        assert await new.users() == set()
        assert old.total("bytes", way="given") == 0
        with pytest.raises(PeerError, match="names relaygr://worker/old and not relaygr://worker/evil"):
            await connect(address, "evil", credentials("new"), NETWORKS)


async def test_a_man_in_the_middle_reads_nothing() -> None:
    async with peers() as (old, new), relayed(old) as (relay, address):
        new.known = {"old": status(old, address=address)}
        new.handover.lanes_changed(ALL, ())
        await until(lambda: new.total("entries", way="taken") == USERS)
        await until(lambda: len(relay.seen) > new.total("bytes", way="taken"))
        for user in range(USERS):
            tokens = history(user, 60).array.astype("<i8").tobytes()
            assert tokens[:16] not in relay.seen
            assert tokens[-16:] not in relay.seen
        assert b"offer" not in relay.seen
        assert b"sha256" not in relay.seen


@pytest.mark.parametrize(
    "opening",
    [b"GET / HTTP/1.1\r\n\r\n", HEADER.pack(2**32 - 1), b"\x16\x03\x01\x02\x00\x01" + b"\xff" * 600, b""],
    ids=["http", "frame", "half a hello", "nothing"],
)
async def test_who_speaks_no_tls_is_hung_up_on(opening: bytes) -> None:
    async with peers() as (old, _):
        with suppress(OSError):
            async with stream_to(old) as (reader, writer):
                writer.write(opening)
                writer.write_eof()
                await reader.read(-1)
        await until(lambda: old.total("failed", way="given") == 1)
        assert old.total("bytes", way="given") == 0


@pytest.mark.parametrize(
    ("name", "host", "secret"),
    [
        ("nobody", "127.0.0.1", {}),
        ("new", "10.9.8.7", {}),
        ("new", "127.0.0.1", {"secret": "another sixteen characters"}),
    ],
    ids=["a name that is not stated", "another host", "another secret"],
)
async def test_who_proves_to_be_somebody_else_gets_nothing(
    name: str, host: str, secret: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HEARD_S", 0.1)
    async with peers() as (old, _):
        with suppress(PeerError):  # in TLS 1.3 who connects is told of a refusal by its first read
            channel = await connect(old.handover.address, "old", credentials(name, host=host, **secret), NETWORKS)
            with pytest.raises(PeerError):
                await channel.receive(Offer, 100)
            await channel.close()
        await until(lambda: old.total("failed", way="given") == 1)


async def test_without_a_certificate_nobody_gets_in() -> None:
    async with peers() as (old, _):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with suppress(OSError):
            async with stream_to(old, ssl=context) as (reader, _):
                assert await reader.read(1) == b""
        await until(lambda: old.total("failed", way="given") == 1)


async def test_tls_1_2_is_not_spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even with a worker of the fleet. Its end just sees a hang-up: asyncio sends no alert."""
    monkeypatch.setattr(service, "limited", LogLimiter().limited)  # the tests before may have used this one up
    async with peers() as (old, _):
        context = credentials("new").context(ssl.Purpose.SERVER_AUTH)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        with capture_logs() as logs:
            with pytest.raises((ssl.SSLError, ConnectionResetError)):
                await asyncio.open_connection("127.0.0.1", port_of(old), ssl=context, server_hostname="127.0.0.1")
            await until(lambda: old.total("failed", way="given") == 1)
        assert ["UNSUPPORTED_PROTOCOL" in line["error"] for line in logs if "error" in line] == [True], logs


@pytest.mark.parametrize("opening", [b"\x16\x03\x01", b""], ids=["half a hello", "nothing"])
async def test_connections_of_strangers_keep_no_worker_out(opening: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are held at once, and opened again as soon as they are hung up on."""
    monkeypatch.setattr(service, "ASK_FOR_S", 60.0)  # on a busy machine, several handshakes may take too long
    hung_up = 0

    async def hold(peer: Peer) -> None:
        nonlocal hung_up
        while True:
            with suppress(OSError):
                async with stream_to(peer) as (reader, writer):
                    writer.write(opening)
                    await reader.read(1)
            hung_up += 1
            await asyncio.sleep(0.01)

    async with peers() as (old, new):
        holding = [asyncio.create_task(hold(old)) for _ in range(service.MAX_STRANGERS + 30)]
        await until(lambda: hung_up > service.MAX_STRANGERS, "some were hung up on")
        new.handover.lanes_changed(ALL, ())
        await until(lambda: new.total("entries", way="taken") == USERS)
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)


async def test_silent_workers_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PROVE_S", 600.0)  # one after the other, this would never end
    async with peers() as (old, new):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = "{}:{}".format(*silent.getsockname())
            for name in ("a-hole", "b-hole", "z-hole"):
                new.known[name] = named(status(old, "draining", address), name)
            new.handover.lanes_changed(ALL, ())
            await until(lambda: new.total("entries", way="taken") == USERS)
            assert new.total("failed", way="taken") == 0
            await new.handover.stop()


async def test_networks_that_are_not_named_are_neither_connected_to_nor_let_in() -> None:
    networks = ("192.0.2.0/24", "2001:db8::/32")
    elsewhere = Networks(networks)
    async with peers(first={"settings": HandoverSettings(secret=SECRET, networks=networks)}) as (old, new):
        with pytest.raises(PeerError, match=r"is at 127\.0\.0\.1, outside `handover\.networks` = 192"):
            await connect(old.handover.address, "old", credentials("new"), elsewhere)
        with pytest.raises(PeerError):
            await connected(old)
        await until(lambda: old.total("failed", way="given") == 1)
        assert await new.users() == set()
