"""A worker's hand-over: gives prefix KV of lanes it lost to whoever asks, and asks for those of lanes it gained.

The new owner pulls: it knows when it has the lanes, what room it has and what that holds, and it stops when it has
enough. It asks every worker that states an address, not only the last owner it heard of: what a lane's users left
behind may lie with several (lanes that moved twice, requests served elsewhere), and who has nothing says so at once.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from relaygr_stream.errors import ConfigError, DeviceError
from relaygr_stream.handover.certificates import Credentials, Networks, make_credentials, stranger
from relaygr_stream.handover.channel import Bandwidth, Channel, PeerError
from relaygr_stream.handover.connection import accept, connect
from relaygr_stream.handover.desk import Desk, HandoverMetrics
from relaygr_stream.handover.giver import Giver, Handed
from relaygr_stream.handover.taker import Taker
from relaygr_stream.handover.wire import SLICE_BYTES, Identity
from relaygr_stream.settings.schema import Handover as HandoverSettings
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.telemetry.listener import Known, Listener
from relaygr_stream.wire.messages import WorkerStatus

log = structlog.get_logger(__name__)
limited = LogLimiter().limited

#: Sessions served at once; each holds one copy and two slices. More workers than this gain lanes at once only when a
#: whole fleet starts, and then there is nothing to fetch: who is turned away asks again.
MAX_SESSIONS: Final = 32
#: Connections whose other end has not proven itself; each has TLS buffers of half a MiB.
MAX_STRANGERS: Final = 64
#: Of so many, none younger than this is hung up on: TLS takes some ten milliseconds, on a loaded machine more. So many
#: handshakes a second at most, 0.3 ms of CPU each, are what strangers can make a worker do.
GRACE_S: Final = 0.25
#: Workers asked at once; each session has one copy on its way. As many silent ones, each for PROVE_S, hold up the rest.
MAX_ASKED: Final = 32
#: Who asks may have stated itself a moment ago: its status is waited for, a few times worker.status_ms.
HEARD_S: Final = 1.5
#: Gained lanes are asked for this long: workers state themselves every worker.status_ms (250 ms), and one that started
#: just now has heard none.
ASK_FOR_S: Final = 5.0
LOOK_S: Final = 0.05
#: After a session that failed, the same worker is asked again no sooner.
RETRY_S: Final = 1.0
#: Bytes that may go at once after a pause: a thirtieth of a second of the bandwidth, at least one slice.
BURST_S: Final = 1 / 30
MIB: Final = 1 << 20


class Handover:
    """Serving and asking, from `start` to `stop`. peers: the newest status of every worker that is not silent."""

    def __init__(
        self,
        settings: HandoverSettings,
        name: str,
        identity: Identity,
        desk: Desk,
        peers: Callable[[], dict[str, WorkerStatus]],
        metrics: HandoverMetrics,
        max_tokens: int,
        nbytes_of: Callable[[int], int],
    ) -> None:
        self._settings = settings
        self._name = name
        self._peers = peers
        self._metrics = metrics
        self._networks = Networks(settings.networks)
        self._credentials: Credentials | None = None
        bytes_per_s = settings.mib_per_s * MIB
        bandwidth = Bandwidth(bytes_per_s, max(SLICE_BYTES, int(BURST_S * bytes_per_s)))
        self._giver = Giver(identity, desk, bandwidth, metrics)
        self._taker = Taker(identity, desk, metrics, max_tokens, nbytes_of)
        self._serving: asyncio.Task[None] | None = None
        self._sessions = 0  # served, with proven workers
        self._asking: asyncio.Task[None] | None = None
        self._asked_now: set[str] = set()  # workers with whom we are in session
        self._wanted: dict[int, float] = {}  # gained lanes → until when they are asked for
        self._asked: defaultdict[tuple[str, int], set[int]] = defaultdict(set)  # name, incarnation → lanes asked for
        self._not_before: dict[str, float] = {}  # workers with whom a session failed → when to ask again
        self._owned: set[int] = set()
        self._left: set[int] = set()  # of the lanes that we leave, those not fetched
        self.address = ""

    async def start(self) -> None:
        """Listen. Raises ConfigError when the address cannot be bound, or the certificate is of no use."""
        settings, host = self._settings, advertised_host(self._settings)
        self._credentials = await asyncio.to_thread(make_credentials, settings, self._name, host)
        try:
            listener = Listener(settings.host, settings.port, self._accept, MAX_STRANGERS, GRACE_S)
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConfigError(
                f"cannot hand over on {settings.host}:{settings.port}: {error}; set handover.host and handover.port "
                f"(port 0: any free one)"
            ) from error
        self._serving = asyncio.create_task(listener.run(), name="hand-over serves")
        self.address = f"{_bracketed(host)}:{listener.port}"
        log.info("hand-over serves", address=self.address, mib_per_s=settings.mib_per_s, networks=settings.networks)

    async def stop(self) -> None:
        """Break off what is under way; the books balance."""
        tasks = [task for task in (self._serving, self._asking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- lanes that come ----

    def lanes_changed(self, gained: Iterable[int], lost: Iterable[int]) -> None:
        """Ask for what others have of the gained lanes' users; for the lost ones no more."""
        self._owned.update(gained)
        for lane in lost:
            self._owned.discard(lane)
            self._wanted.pop(lane, None)
            for asked in self._asked.values():
                asked.discard(lane)
        until = time.monotonic() + ASK_FOR_S
        self._wanted.update(dict.fromkeys(gained, until))
        if self._wanted and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask_peers(), name="hand-over")

    async def _ask_peers(self) -> None:
        """Ask everyone for everything wanted, side by side, until it is over."""
        async with asyncio.TaskGroup() as sessions:
            while self._wanted or self._asked_now:
                now = time.monotonic()
                for peer in self._next_peers(now):
                    lanes = frozenset(self._wanted) - self._asked[peer.name, peer.incarnation]
                    if lanes and len(self._asked_now) < MAX_ASKED:
                        self._asked_now.add(peer.name)
                        sessions.create_task(self._take_from(peer, lanes))
                self._wanted = {lane: until for lane, until in self._wanted.items() if until > now}
                await asyncio.sleep(LOOK_S)
        self._asked.clear()
        self._not_before.clear()

    def _next_peers(self, now: float) -> list[WorkerStatus]:
        """In any order: where more are stated than are asked at once, none is last each time."""
        peers = [peer for peer in self._reachable() if peer.name not in self._asked_now]
        random.shuffle(peers)
        return [peer for peer in peers if self._not_before.get(peer.name, 0.0) <= now]

    def _reachable(self) -> list[WorkerStatus]:
        return [
            status
            for name, status in self._peers().items()
            if status.handover and name != self._name and status.state != "stopped"
        ]

    async def _take_from(self, peer: WorkerStatus, lanes: frozenset[int]) -> None:
        handed, start = Handed(peer.name), time.monotonic()
        asked = self._asked[peer.name, peer.incarnation]
        asked |= lanes
        try:
            assert self._credentials is not None
            channel = await connect(peer.handover, peer.name, self._credentials, self._networks)
            try:
                await self._taker.take(channel, lanes, self._owned, handed)
            finally:
                await channel.close()
        except (PeerError, DeviceError) as error:
            asked -= lanes
            self._not_before[peer.name] = time.monotonic() + RETRY_S
            self._metrics.failed.labels("taken").inc()
            limited(log.warning, "taken")(
                "hand-over failed", peer=peer.name, address=peer.handover, error=str(error), entries=handed.entries
            )
        finally:
            self._asked_now.discard(peer.name)
            self._report("taken", handed, time.monotonic() - start)

    # ---- lanes that go ----

    async def farewell(self, lanes: Iterable[int], seconds: float) -> None:
        """We left, and these lanes were ours: stay until their new owners have fetched what they want, at most so long.

        Returns at once where nobody would ask: no other worker serves, or none hands over.
        """
        self._left = set(lanes)
        if not (self._left and self._others_serve()):
            return
        start = busy = time.monotonic()
        while self._left and self._others_serve() and time.monotonic() < min(start + seconds, busy + ASK_FOR_S):
            await asyncio.sleep(LOOK_S)
            busy = time.monotonic() if self._sessions else busy
        waited = round(time.monotonic() - start, 3)
        if self._left:
            log.warning("left before all lanes were handed over", lanes=sorted(self._left), waited_s=waited)
        else:
            log.info("all lanes handed over", waited_s=waited)

    def _others_serve(self) -> bool:
        return any(peer.state == "serving" for peer in self._reachable())

    async def _accept(self, connection: socket.socket, known: Known) -> None:
        assert self._credentials is not None
        handed = Handed()
        try:
            channel, handed.peer = await accept(connection, self._credentials, self._networks)
            try:
                await self._check_stated(channel, handed.peer)
                if self._sessions >= MAX_SESSIONS:
                    raise PeerError(f"is one too many: {MAX_SESSIONS} workers are served at once")
                known()
                await self._serve(channel, handed)
            finally:
                channel.abort()  # where it is not closed yet
        except (PeerError, DeviceError) as error:
            self._metrics.failed.labels("given").inc()
            limited(log.warning, "given")(
                "hand-over failed", peer=handed.peer, error=str(error), entries=handed.entries
            )
        if handed.ended:
            self._left -= handed.lanes

    async def _check_stated(self, channel: Channel, name: str) -> None:
        """Return if the certificate is that of a worker that states itself. Raises PeerError."""
        until = time.monotonic() + HEARD_S
        while (status := self._peers().get(name)) is None or not status.handover:
            if time.monotonic() > until:
                raise PeerError("is no worker that `worker-status` tells of")
            await asyncio.sleep(LOOK_S)
        if problem := stranger(channel.certificate, name, _host(status.handover)):
            raise PeerError(problem)

    async def _serve(self, channel: Channel, handed: Handed) -> None:
        self._sessions += 1
        start = time.monotonic()
        try:
            await self._giver.serve(channel, handed)
        finally:
            self._sessions -= 1
            self._report("given", handed, time.monotonic() - start)
        await channel.close()

    def _report(self, way: str, handed: Handed, seconds: float) -> None:
        self._metrics.seconds.labels(way).inc(seconds)
        write = log.info if handed.entries else log.debug
        write(
            f"prefix KV {way}",
            peer=handed.peer,
            lanes=len(handed.lanes),
            entries=handed.entries,
            mib=round(handed.nbytes / MIB, 3),
            seconds=round(seconds, 3),
            whole=handed.ended,
        )


def advertised_host(settings: HandoverSettings) -> str:
    """The host by which others reach us: as set, or where we listen; on any address, this host's name."""
    if settings.advertise:
        return settings.advertise
    return socket.gethostname() if settings.host in ("0.0.0.0", "::", "") else settings.host


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
