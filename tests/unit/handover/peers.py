"""Workers' caches on their own device threads, with a hand-over each, for tests of sessions between them."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry

from relaygr_stream.engine.commands import Answer, Placed, Rank
from relaygr_stream.engine.scheduler import Scheduler
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.handover.certificates import Credentials, Networks, make_credentials
from relaygr_stream.handover.channel import Channel, PeerError
from relaygr_stream.handover.connection import connect
from relaygr_stream.handover.desk import Desk, HandoverMetrics
from relaygr_stream.handover.pace import CopyPace
from relaygr_stream.handover.service import HandoverService
from relaygr_stream.handover.session import Taker
from relaygr_stream.handover.tls import TlsSocket
from relaygr_stream.handover.wire import Ask, PrefixIdentity
from relaygr_stream.settings.worker import Handover as HandoverSettings
from relaygr_stream.wire.messages import WorkerStatus
from relaygr_stream.worker.device import DeviceThread
from tests.statuses import worker_status
from tests.unit.cache.worlds import entries
from tests.unit.engine.worlds import MAX_TOKENS, World, look
from tests.waiting import until

LANES = 8
SECRET = "sixteen or more characters"
ALL = frozenset(range(LANES))
NETWORKS = Networks(HandoverSettings().networks)


class RawChannel(Channel):
    """A channel on which anything can be written."""

    async def write(self, data: bytes) -> None:
        await self._connection.send(data)


class Peer:
    """A worker's cache, device thread and hand-over; `known` are the statuses it has heard."""

    def __init__(
        self,
        name: str,
        secret: str = SECRET,
        rate: float = 1e3,
        dram: int = 30,
        folder: Path | None = None,
        settings: HandoverSettings | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self.name = name
        self.answers: list[Answer] = []
        self.world = World(hbm=30, dram=dram, folder=folder)
        self.thread = DeviceThread(asyncio.get_running_loop(), self)
        self.known: dict[str, WorkerStatus] = {}
        self.registry = CollectorRegistry()
        layout = self.world.truth.layout
        self.identity = PrefixIdentity(
            model_version=self.world.truth.version,
            layers=layout.layers,
            heads=layout.heads,
            dqk=layout.dqk,
            dv=layout.dv,
            dtype="float32",
            device="cpu",
            lanes=LANES,
        )
        self.layout = layout
        self.desk, self.metrics = Desk(self.thread), HandoverMetrics(self.registry)
        self.handover = HandoverService(
            settings or HandoverSettings(secret=secret, mib_per_s=rate),
            name,
            self.identity,
            self.desk,
            cast(OwnerDirectory, SimpleNamespace(workers=lambda: self.known)),
            self.metrics,
            max_tokens,
            self.layout,
        )

    def taker(self) -> Taker:
        """For a session apart from the hand-over."""
        return Taker(self.identity, self.desk, CopyPace(), self.metrics, MAX_TOKENS, self.layout)

    def on_answers(self, answers: list[Answer]) -> None:
        self.answers += answers

    def on_placed(self, placed: list[Placed]) -> None: ...

    async def on_core(self, call: Callable[[Scheduler], Any]) -> Any:
        return await self.thread.ask(look(lambda scheduler, _: call(scheduler)))

    def ranking(self, request: str, user: int, length: int, **options: Any) -> Rank:
        self.world.now = time.monotonic()
        return Rank(self.world.ranking(request, user, length, timeout=30.0, **options))

    async def rank(self, user: int, length: int, tenant: str = "") -> Answer:
        request = f"r{len(self.answers)}"
        self.thread.submit(self.ranking(request, user, length, tenant=tenant))
        await until(lambda: any(answer.task.request_id == request for answer in self.answers))
        return self.answers[-1]

    async def users(self) -> set[str]:
        return set(await self.on_core(lambda core: core.cache.transit.users()))

    async def at_rest(self) -> None:
        """Books balance, and nothing is lent, or on its way here."""

        def look(core: Scheduler) -> bool:
            core.check_integrity()
            return not (core.cache.transit.reserved_bytes or any(entry.leases for entry in entries(core.cache)))

        for _ in range(500):
            if await self.on_core(look):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("something is still lent or expected")

    def total(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"relaygr_handover_{name}_total", labels) or 0.0


def status(peer: Peer, state: Any = "serving", address: str | None = None) -> WorkerStatus:
    return worker_status(peer.name, state=state, handover=peer.handover.address if address is None else address)


@asynccontextmanager
async def peers(first: Mapping[str, Any] | None = None, **second: Any) -> AsyncIterator[tuple[Peer, Peer]]:
    """An old owner who served some users, and a new one who knows of it. Both end with balanced books.

    first, second: arguments of Peer for each.
    """
    old, new = Peer("old", **(first or {})), Peer("new", **second)
    for peer in (old, new):
        await peer.thread.start(lambda peer=peer: peer.world)  # type: ignore[misc]
        await peer.handover.start()
    old.known = {"new": status(new)}
    new.known = {"old": status(old), "new": status(new)}
    try:
        for user in range(6):
            await old.rank(user, 60 + 20 * user)
        yield old, new
    finally:
        for peer in (old, new):
            await peer.handover.stop()
            await peer.at_rest()
            assert await peer.thread.stop(10)
            peer.thread.failed.done() and peer.thread.failed.result()


def credentials(name: str, secret: str = SECRET, host: str = "127.0.0.1") -> Credentials:
    """As a worker of that name and host has them."""
    return make_credentials(HandoverSettings(secret=secret), name, host)


async def connected(peer: Peer, by: str = "new") -> Channel:
    """A channel to that worker, by a worker whose hand-over is not asked."""
    return await connect(peer.handover.address, peer.name, credentials(by), NETWORKS)


async def connected_raw(peer: Peer, by: str = "new") -> RawChannel:
    """The same without any check on our side."""
    host, _, port = peer.handover.address.rpartition(":")
    raw = socket.create_connection((host, int(port)))
    raw.setblocking(False)
    return RawChannel(await TlsSocket.prove(raw, credentials(by).context(ssl.Purpose.SERVER_AUTH), host))


@asynccontextmanager
async def giver(talk: Callable[[RawChannel], Awaitable[None]], name: str) -> AsyncIterator[str]:
    """The address of a worker that knows the secret and answers to this name, but does as `talk` says once asked."""
    trusted = credentials(name)

    async def serve(server: socket.socket) -> None:
        raw, _ = await asyncio.get_running_loop().sock_accept(server)
        channel = RawChannel(await TlsSocket.prove(raw, trusted.context(ssl.Purpose.CLIENT_AUTH)))
        with suppress(PeerError):
            await channel.receive(Ask, 10**5)
            await talk(channel)
        await channel.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        serving = asyncio.create_task(serve(server))
        yield "{}:{}".format(*server.getsockname())
        await serving
