"""A worker's hand-over service: it serves the prefix KV of lost lanes, and fetches the prefix KV of gained lanes.

The new owner pulls: it knows when it has the lanes, and how much room its DRAM tier has. It asks every worker that
states an address, since several may have entries of a lane (lanes that moved twice, requests served elsewhere). A
worker without entries says so at once.
"""

from __future__ import annotations

import asyncio
import math
import random
import socket
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Final, Protocol

import msgspec
import structlog

from relaygr_stream.errors import DeviceError
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.handover.certificates import Credentials, Networks, identity_problem, make_credentials
from relaygr_stream.handover.channel import Channel, PeerError
from relaygr_stream.handover.connection import PROVE_S, accept, connect
from relaygr_stream.handover.desk import Desk, HandoverMetrics
from relaygr_stream.handover.pace import Computing, CopyPace
from relaygr_stream.handover.session import Giver, SessionProgress, Taker
from relaygr_stream.handover.tls import SLICE_BYTES
from relaygr_stream.handover.wire import TOKEN_BYTES, PrefixIdentity
from relaygr_stream.models.kv import KVLayout
from relaygr_stream.settings.worker import Handover as HandoverSettings
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.telemetry.listener import Known, Listener
from relaygr_stream.wire.messages import WorkerStatus

log = structlog.get_logger(__name__)
limited = LogLimiter().limited

#: Sessions served at once; each holds one copy. More workers gain lanes at once only when a whole fleet
#: starts, and then there is nothing to fetch. A refused worker asks again.
MAX_SESSIONS: Final = 32
#: Connections whose other end is not authenticated yet; each has TLS buffers of half a MiB.
MAX_STRANGERS: Final = 64
#: With MAX_STRANGERS connections of as many addresses, none younger than this is closed: TLS takes about ten
#: milliseconds, more on a loaded machine.
GRACE_S: Final = 0.25
#: Sessions fetched at once, each with one copy in transit. That many silent workers block the others for PROVE_S.
MAX_ASKED: Final = 32
#: How long a session waits for the other worker's status, which may be on its way: a few worker.status_interval_ms.
HEARD_S: Final = 1.5
#: How long workers are asked for gained lanes. Workers publish their status every worker.status_interval_ms (250 ms),
#: and a worker that has just started has received none.
ASK_FOR_S: Final = 5.0
#: The interval of all polling here.
LOOK_S: Final = 0.05
#: The pause before the same worker is asked again after a failed session.
RETRY_S: Final = 1.0
MIB: Final = 1 << 20


class Counted(Protocol):
    """Knows the number of lanes; the TopicSet does."""

    @property
    def lanes(self) -> int:
        """So many there are now."""


class HandoverService:
    """Serves and fetches from `start` to `stop`. peers: what the workers state.

    max_tokens: the longest sequence. layout: of a copy in the DRAM tier. token_bytes: of a token in an offer.
    beside: see CopyPace. counted: has the number of lanes now; None: it stays that of the identity.
    """

    def __init__(
        self,
        settings: HandoverSettings,
        name: str,
        identity: PrefixIdentity,
        desk: Desk,
        peers: OwnerDirectory,
        metrics: HandoverMetrics,
        max_tokens: int,
        layout: KVLayout,
        token_bytes: int = TOKEN_BYTES,
        beside: Computing | None = None,
        counted: Counted | None = None,
    ) -> None:
        self._settings = settings
        self._name = name
        self._peers = peers
        self._metrics = metrics
        self._identity, self._counted = identity, counted or identity
        self._networks = Networks(settings.networks)
        self._credentials: Credentials | None = None
        given, taken = CopyPace(beside, settings.mib_per_s * MIB, SLICE_BYTES), CopyPace(beside)
        self._giver = Giver(identity, desk, given, metrics)
        self._taker = Taker(identity, desk, taken, metrics, max_tokens, layout, token_bytes)
        self._background = Background()
        self._sessions = 0  # sessions served now, with authenticated workers
        self._asking: asyncio.Task[None] | None = None
        self._asked_now: set[str] = set()  # workers from whom a session fetches now
        self._wanted: dict[int, float] = {}  # gained lane → time until which workers are asked for it
        self._asked: defaultdict[tuple[str, int], set[int]] = defaultdict(set)  # name, incarnation → lanes asked for
        self._not_before: dict[str, float] = {}  # worker of a failed session → time to ask it again
        self._owned: set[int] = set()
        self._left: set[int] = set()  # lanes that this worker left and no other has fetched yet
        self.address = ""

    async def start(self) -> None:
        """Start to listen. Raises ConfigError if the address cannot be bound or the certificate is invalid."""
        settings, host = self._settings, advertised_host(self._settings)
        self._credentials = await asyncio.to_thread(make_credentials, settings, self._name, host)
        listener = Listener("handover", settings.host, settings.port, self._accept, MAX_STRANGERS, GRACE_S, PROVE_S)
        self._background.start(listener.run(), "hand-over serves")
        self.address = f"{_bracketed(host)}:{listener.port}"
        log.info("hand-over serves", address=self.address, mib_per_s=settings.mib_per_s, networks=settings.networks)

    @property
    def failed(self) -> asyncio.Future[None]:
        """A future that completes, with the error, only by a defect outside of a session."""
        return self._background.failed

    async def stop(self) -> None:
        """Cancel all sessions; their leases and reservations end."""
        await self._background.end()

    # ---- gained lanes ----

    def lanes_changed(self, gained: Iterable[int], lost: Iterable[int]) -> None:
        """Start to fetch the gained lanes' entries from other workers; stop fetching those of the lost lanes."""
        self._owned.update(gained)
        for lane in lost:
            self._owned.discard(lane)
            self._wanted.pop(lane, None)
            for asked in self._asked.values():
                asked.discard(lane)
        until = time.monotonic() + ASK_FOR_S
        self._wanted.update(dict.fromkeys(gained, until))
        if self._wanted and (self._asking is None or self._asking.done()):
            self._asking = self._background.start(self._ask_peers(), "hand-over")

    async def _ask_peers(self) -> None:
        """Fetch all wanted lanes from all workers concurrently, until ASK_FOR_S has passed and all sessions ended."""
        async with asyncio.TaskGroup() as sessions:
            while self._wanted or self._asked_now:
                now = time.monotonic()
                unknown = max(self._wanted, default=0) >= self._counted.lanes  # lanes were just added
                for peer in () if unknown else self._next_peers(now):
                    lanes = frozenset(self._wanted) - self._asked[peer.name, peer.incarnation]
                    if lanes and len(self._asked_now) < MAX_ASKED:
                        self._asked_now.add(peer.name)
                        sessions.create_task(self._take_from(peer, lanes))
                self._wanted = {lane: until for lane, until in self._wanted.items() if until > now}
                await asyncio.sleep(LOOK_S)
        self._asked.clear()
        self._not_before.clear()

    def _next_peers(self, now: float) -> list[WorkerStatus]:
        """Workers to ask, shuffled: with more than MAX_ASKED workers, none is always the last."""
        peers = [peer for peer in self._reachable() if peer.name not in self._asked_now]
        random.shuffle(peers)
        return [peer for peer in peers if self._not_before.get(peer.name, 0.0) <= now]

    def _reachable(self) -> list[WorkerStatus]:
        return [
            status
            for name, status in self._peers.workers().items()
            if status.handover and name != self._name and status.state != "stopped"
        ]

    async def _take_from(self, peer: WorkerStatus, lanes: frozenset[int]) -> None:
        progress, start = SessionProgress(peer.name), time.monotonic()
        asked = self._asked[peer.name, peer.incarnation]
        asked |= lanes
        try:
            assert self._credentials is not None
            self._taker.identity = msgspec.structs.replace(self._identity, lanes=self._counted.lanes)
            channel = await connect(peer.handover, peer.name, self._credentials, self._networks)
            try:
                await self._taker.take(channel, lanes, self._owned, progress)
            finally:
                await channel.close()
        except (PeerError, DeviceError) as error:
            asked -= lanes
            self._not_before[peer.name] = time.monotonic() + RETRY_S
            self._metrics.failed.labels("taken").inc()
            limited(log.warning, "taken")(
                "hand-over failed", peer=peer.name, address=peer.handover, error=str(error), entries=progress.entries
            )
        except Exception as error:  # a defect, maybe by what the peer sent: the worker serves on without these entries
            self._not_before[peer.name] = math.inf
            self._metrics.failed.labels("taken").inc()
            limited(log.error, "defect")("hand-over failed by a defect", peer=peer.name, exc_info=error)
        finally:
            self._asked_now.discard(peer.name)
            self._report("taken", progress, time.monotonic() - start)

    # ---- lost lanes ----

    def leaving(self, lanes: Iterable[int]) -> None:
        """The worker is about to leave the group, and with it these lanes."""
        self._left = set(lanes)

    async def farewell(self, seconds: float) -> None:
        """After leaving the group, wait until the lanes' new owners have fetched their entries, at most `seconds`.

        Returns at once if no other worker with its hand-over on serves, or starts.
        """
        start = busy = time.monotonic()
        while waits := bool(self._sessions or (self._left and self._others_come())):
            now = time.monotonic()
            if self._sessions or not self._left <= self._owned_elsewhere():
                busy = now  # who gets lanes asks within ASK_FOR_S; the group may take longer to give them
            if now > min(start + seconds, busy + ASK_FOR_S):
                break
            await asyncio.sleep(LOOK_S)
        waited = round(time.monotonic() - start, 3)
        if self._left and (waits or waited):
            log.warning("stopped before all lanes were handed over", lanes=sorted(self._left), waited_s=waited)
        elif waited:
            log.info("all lanes handed over", waited_s=waited)

    def _others_come(self) -> bool:
        return any(peer.state in ("starting", "serving") for peer in self._reachable())

    def _owned_elsewhere(self) -> set[int]:
        others = (peer for name, peer in self._peers.workers().items() if name != self._name)
        return {lane.lane for peer in others if peer.state == "serving" for lane in peer.lanes}

    async def _accept(self, connection: socket.socket, known: Known) -> None:
        assert self._credentials is not None
        progress = SessionProgress()
        try:
            channel, progress.peer = await accept(connection, self._credentials, self._networks)
            try:
                await self._check_stated(channel, progress.peer)
                if self._sessions >= MAX_SESSIONS:
                    raise PeerError(f"exceeds the limit of {MAX_SESSIONS} sessions at once")
                known()
                await self._serve(channel, progress)
            finally:
                channel.abort()  # harmless if it is closed already
        except (PeerError, DeviceError) as error:
            self._metrics.failed.labels("given").inc()
            limited(log.warning, "given")(
                "hand-over failed", peer=progress.peer, error=str(error), entries=progress.entries
            )
        if progress.ended or progress.useless:
            self._left -= progress.lanes

    async def _check_stated(self, channel: Channel, name: str) -> None:
        """Check that the certificate belongs to a worker that publishes its status. Raises PeerError if not."""
        until = time.monotonic() + HEARD_S
        while (status := self._peers.workers().get(name)) is None or not status.handover:
            if time.monotonic() > until:
                raise PeerError(f"is {name!r}, of which `worker-status` has no status with a hand-over address")
            await asyncio.sleep(LOOK_S)
        if problem := identity_problem(channel.certificate, name, _host(status.handover)):
            raise PeerError(problem)

    async def _serve(self, channel: Channel, progress: SessionProgress) -> None:
        self._sessions += 1
        start = time.monotonic()
        try:
            await self._giver.serve(channel, progress)
        finally:
            self._sessions -= 1
            self._report("given", progress, time.monotonic() - start)
        await channel.close()

    def _report(self, way: str, progress: SessionProgress, seconds: float) -> None:
        self._metrics.seconds.labels(way).inc(seconds)
        write = log.info if progress.entries else log.debug
        write(
            f"prefix KV {way}",
            peer=progress.peer,
            lanes=len(progress.lanes),
            entries=progress.entries,
            mib=round(progress.nbytes / MIB, 3),
            seconds=round(seconds, 3),
            whole=progress.ended,
        )


def advertised_host(settings: HandoverSettings) -> str:
    """The host by which other workers reach this one: handover.advertise, else handover.host, else the host's name."""
    if settings.advertise:
        return settings.advertise
    return socket.gethostname() if settings.host in ("0.0.0.0", "::", "") else settings.host


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
