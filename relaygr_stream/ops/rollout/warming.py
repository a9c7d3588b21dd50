"""Has workers of the new group prefill users before they move, in the device time that they have to spare.

rankings in the old group ─► users.py ─► delegated signals to the owners of their lanes in the new group

A signal on another worker's behalf is what workers take from each other already: it is computed behind what their own
users wait for, within room of its own, and gives way to a signal of the user. Nobody waits for these.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from operator import itemgetter
from typing import Final, NamedTuple

import msgspec
import structlog

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.producer import NO_LEADER, Producer
from relaygr_stream.bus.tail import STATUS_PAUSE_S, TopicTail
from relaygr_stream.errors import BrokerError, BrokerUnavailable, DecodeError
from relaygr_stream.fleet import FULL_SHARE, Books, Claim, OwnerDirectory, SentSignals
from relaygr_stream.ops.rollout.users import KnownUsers, User
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.erase import KIND as ERASE
from relaygr_stream.wire.erase import Erase, filter_named_users, read_erase
from relaygr_stream.wire.messages import RankingRequest
from relaygr_stream.wire.records import HEADER_KIND, KIND_DELEGATED, Record, kind_of
from relaygr_stream.wire.routes import Routes
from relaygr_stream.wire.topic_files import TopicSet, load_topics
from relaygr_stream.wire.worker_status import StatusReader, prefix_bytes, usable_costs

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited

#: A step waits, within its time, until so much of what those who move are worth is prefilled: the rest came just now.
ENOUGH: Final = 0.9
#: Work that a worker has waiting when it gets more. It states itself every 250 ms, and between that it is predicted.
AHEAD_MS: Final = 100.0
TICK_S: Final = 0.05
#: Users are watched for so long, at least, before the first of them move.
SEEN_S: Final = 10.0
#: Who is sent next is put in order so often.
PLAN_S: Final = 1.0
#: A lane whose broker takes nothing, or refuses, is tried again after this.
PAUSE_S: Final = 5.0
SENDING_S: Final = 0.2
#: Erasures against which rankings read behind them are compared: a relaxed tail is 0.3 s late.
ERASED: Final = 64


class Warmed(NamedTuple):
    """Of users lately seen who move next, and whom their workers have room for. share: of uses × prefill time."""

    sent: int
    users: int
    share: float

    def __str__(self) -> str:
        return f"{self.sent} of {self.users} users lately seen who move now have prefix KV ({self.share:.0%} by use)"


class Warming:
    """Sends the signals. group: settings of the new group, of this name. lanes: that it has. Call `aim` before each
    step."""

    def __init__(self, group: Settings, name: str, lanes: int, producer: Producer, reader: StatusReader) -> None:
        self._topics: TopicSet = load_topics(group.kafka)
        self._name = name
        self._life_ms = group.relay.life_window_ms
        self._producer = producer
        self._reader = reader
        self._owners = OwnerDirectory(group.trigger.max_status_age_ms, reader=reader)
        self._books: Books[SentSignals] = Books(SentSignals)
        self._known = KnownUsers(lanes)
        self._since_s = time.monotonic()
        self._aim: tuple[Routes, Routes] | None = None  # now, and after the next step
        self._queues: dict[str, deque[User]] = {}  # by worker, the worthiest first
        self._erased: deque[tuple[int, Erase]] = deque(maxlen=ERASED)  # with the brokers' time
        self._erasing: list[Erase] = []
        self._paused_s: dict[int, float] = {}  # lane → until when

    def aim(self, now: Routes, then: Routes) -> None:
        """Who moves when the routes become `then`."""
        self._known.moved(now, self._name)
        self._aim = now, then
        self._queues = {}

    def progress(self) -> Warmed:
        """As of now."""
        fitting = [(worth, user) for worth, user, _ in self._fitting()]
        sent = [(worth, user) for worth, user in fitting if user.signal is None]
        worth = sum(map(itemgetter(0), fitting))
        return Warmed(len(sent), len(fitting), sum(map(itemgetter(0), sent)) / worth if worth else 1.0)

    @property
    def looking_s(self) -> float:
        """For how long it still has to watch users before the first of them move."""
        return self._since_s + SEEN_S - time.monotonic()

    async def run(self) -> None:
        """Send, until cancelled."""
        planned_s = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            for erase in self._take_erasing():
                self._known.drop(await filter_named_users(self._known.keys, erase))
                planned_s = 0.0
            if time.monotonic() - planned_s >= PLAN_S:
                planned_s = time.monotonic()
                self._queues = self._plan()
            for queue in list(self._queues.values()):
                await self._send(queue)

    # ---- what is read ----

    def on_rankings(self, records: list[Record]) -> None:
        """Count the uses of the old group's users."""
        for record in records:
            if kind_of(record.headers):
                continue
            with suppress(DecodeError):  # a worker's to judge
                request = decode(RankingRequest, record.value)
                if not self._is_erased(request, record.timestamp_ms):
                    self._known.ranked(request)

    def on_statuses(self, records: list[Record]) -> None:
        """Follow the new group's workers, and drop users who are erased."""
        self._owners.on_records(records)
        for record in records:
            if kind_of(record.headers) == ERASE:
                with suppress(DecodeError):  # workers say that they refuse it
                    if (erase := read_erase(record, self._reader)) is not None:
                        self._erased.append((record.timestamp_ms, erase))
                        self._erasing.append(erase)

    def _is_erased(self, request: RankingRequest, at_ms: int) -> bool:
        """Whether the user was erased after the ranking."""
        return any(at_ms <= each and erase.names(KnownUsers.key_of(request)) for each, erase in self._erased)

    def _take_erasing(self) -> list[Erase]:
        taken, self._erasing = self._erasing, []
        return taken

    # ---- what is sent ----

    def _fitting(self) -> list[tuple[float, User, str]]:
        """Those who move and whom their lanes' owners have room for: what each is worth, and the owner; best first."""
        found: list[tuple[float, User, Claim]] = []
        for user in self._known.moving(*self._aim, self._name) if self._aim else ():
            if (claim := self._owners.owner(user.lane)) is not None:
                ms = usable_costs(claim.worker.costs).pre_infer_ms(user.tokens)
                found.append((user.uses * ms, user, claim))
        found.sort(key=itemgetter(0), reverse=True)
        left: dict[str, int] = {}
        fitting = []
        for worth, user, claim in found:
            worker = claim.worker
            room = left.get(worker.name, max(worker.hbm_bytes, worker.dram_bytes)) - prefix_bytes(user.tokens, worker)
            if room >= 0:
                left[worker.name] = room
                fitting.append((worth, user, worker.name))
        return fitting

    def _plan(self) -> dict[str, deque[User]]:
        queues: defaultdict[str, deque[User]] = defaultdict(deque)
        for _, user, worker in self._fitting():
            if user.signal is not None:
                queues[worker].append(user)
        return queues

    async def _send(self, queue: deque[User]) -> None:
        """Send what the worker has time and room for now."""
        while queue and not self._erasing:
            user, now_s = queue[0], time.monotonic()
            claim = self._owners.owner(user.lane)
            if user.signal is None or claim is None or now_s < self._paused_s.get(user.lane, now_s):
                queue.popleft()  # planned again
                continue
            worker = claim.worker
            cost_ms = usable_costs(worker.costs).pre_infer_ms(user.tokens)
            nbytes, book = prefix_bytes(user.tokens, worker), self._books.of_worker(worker.name, now_s)
            ahead = book.ahead(claim, now_s)
            room = worker.delegated_bytes - ahead.delegated_bytes
            if ahead.ms > AHEAD_MS or worker.busy_share > FULL_SHARE or nbytes > room:
                return
            queue.popleft()
            book.send(cost_ms, nbytes, now_s, delegated=True)
            await self._send_one(user)

    async def _send_one(self, user: User) -> None:
        assert user.signal is not None
        topic, headers = self._topics.ranking.name, [(HEADER_KIND, KIND_DELEGATED.encode())]
        signal = msgspec.structs.replace(user.signal, admitted_ms=now_ms(), life_ms=self._life_ms)
        try:
            if self._producer.broker_of(topic, user.lane) == NO_LEADER:
                raise BrokerUnavailable("no broker takes messages for its lane")
            async with asyncio.timeout(SENDING_S):
                key = user.user_id.encode()
                sent = await self._producer.send(topic, encode(signal), key=key, partition=user.lane, headers=headers)
        except (TimeoutError, BrokerError) as error:
            self._not_sent(user, error)
        else:
            sent.add_done_callback(partial(self._on_sent, user))

    def _on_sent(self, user: User, sent: asyncio.Future[int]) -> None:
        if not sent.cancelled():
            if (error := sent.exception()) is not None:
                self._not_sent(user, error)
            else:
                self._known.sent(user)

    def _not_sent(self, user: User, error: BaseException) -> None:
        """It is planned again."""
        self._paused_s[user.lane] = time.monotonic() + PAUSE_S
        limited(log.warning, "warming")("a user who moves is not prefilled now", error=str(error) or "no room to send")


@asynccontextmanager
async def warming(
    source: Settings, group: Settings, name: str, lanes: tuple[int, int], producer: Producer, background: Background
) -> AsyncIterator[Warming | None]:
    """Follow the old group's rankings and the new group's workers. None, and a warning, where they cannot be read.

    lanes: that the old group has on the cluster, and the new one. background: runs it, and fails with it.
    """
    topics, of_group = load_topics(source.kafka), load_topics(group.kafka)
    reader = StatusReader.from_settings(group, of_group)
    await reader.prepare()
    found = Warming(group, name, lanes[1], producer, reader)
    statuses = TopicTail(
        group.kafka, of_group.worker_status.name, [0], "latest", found.on_statuses, pause_s=STATUS_PAUSE_S
    )
    rankings = TopicTail(source.kafka, topics.ranking.name, range(lanes[0]), "latest", found.on_rankings, relaxed=True)
    async with statuses:
        try:
            await rankings.start()
        except BrokerError as error:
            log.warning("users move without prefix KV: rankings cannot be read", error=str(error))
            yield None
            return
        background.watch(statuses.failed, rankings.failed)
        background.start(found.run())
        try:
            yield found
        finally:
            await rankings.stop()
