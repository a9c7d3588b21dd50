"""The first plane: this member's place in a consumer group, and the commits that only a member may make.

The consumer in here joins the group and never fetches. aiokafka's protocol is eager: a rebalance revokes everything
and hands it out anew; what really moved is for lanes.py to see, which owns the records. Traps that shape the code, all
measured (DESIGN §5): a commit that races a rebalance is refused, upon which aiokafka forgets its membership and causes
the next rebalance; a consumer that is not polled leaves the group after max.poll.interval.ms.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import (
    CommitFailedError,
    IllegalStateError,
    InconsistentGroupProtocolError,
    InvalidSessionTimeoutError,
    KafkaError,
)

from relaygr_stream.bus.aiokafka_compat import RETRY_BACKOFF_MS, broker_error, client_options, end_consumer
from relaygr_stream.bus.assignor import StickyLaneAssignor
from relaygr_stream.bus.renewed import watch
from relaygr_stream.errors import BrokerError, ConfigError
from relaygr_stream.settings.schema import Kafka

log = structlog.get_logger(__name__)

#: A poll costs 10 µs and keeps the membership alive for max_poll_ms, of which at least 1000 ms make sense.
POLL_S: Final = 0.2
#: A JoinGroup request waits at the broker for the slowest member, at most the rebalance timeout, and then some.
JOIN_MARGIN_MS: Final = 5000


class Membership:
    """One member of one group: reports its lanes, commits for them, and gives them up when progress stops.

    on_assigned(lanes, continuous): the lanes from now on; `continuous` tells whether the lanes held before were ours
    all the time, or may have been another's since. on_left(): this member is out of the group, all lanes are lost.
    committable(leaving): what to commit for each partition owned, an offset and its metadata, asked just before;
    leaving: the lanes may be another's right after.
    progressing(): whether the process gets on with its work; while it does not, the group is not told that we live.
    All are called on the loop and must be quick.
    """

    def __init__(
        self,
        kafka: Kafka,
        *,
        topics: Sequence[str],
        group: str,
        member: str,
        capacity: float,
        on_assigned: Callable[[frozenset[int], bool], None],
        on_left: Callable[[], None],
        committable: Callable[[bool], Mapping[tuple[str, int], tuple[int, str]]],
        progressing: Callable[[], bool],
    ) -> None:
        if kafka.session_timeout_ms < 3 * kafka.heartbeat_ms:
            raise ConfigError(
                f"kafka.session_timeout_ms = {kafka.session_timeout_ms} leaves no room for three heartbeats of "
                f"kafka.heartbeat_ms = {kafka.heartbeat_ms}: one lost heartbeat would cost the lanes"
            )
        self._kafka = kafka
        self._topics = topics
        self._group = group
        self._member = member
        self._on_assigned = on_assigned
        self._on_left = on_left
        self._committable = committable
        self._progressing = progressing
        self._assignor = StickyLaneAssignor(capacity, self._on_assignment)
        self._consumer: Any = None
        self._ended: str | None = None  # what must not end while we are a member, and has
        self._polled = 0.0
        self._gate_open = False
        self._commit_lock = asyncio.Lock()
        self._last_commit: asyncio.Task[None] | None = None
        self._committed: dict[tuple[str, int], tuple[int, str]] = {}
        self.rebalances = 0
        self.commits_refused = 0

    async def start(self) -> None:
        """Join; returns with the first assignment. Raises BrokerUnavailable, BrokerError, ConfigError."""
        options = client_options(self._kafka, self._member)
        options["request_timeout_ms"] = max(
            options["request_timeout_ms"], self._kafka.session_timeout_ms + JOIN_MARGIN_MS
        )
        self._consumer = AIOKafkaConsumer(
            **options,
            group_id=self._group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            partition_assignment_strategy=[self._assignor],
            session_timeout_ms=self._kafka.session_timeout_ms,
            heartbeat_interval_ms=self._kafka.heartbeat_ms,
            max_poll_interval_ms=self._kafka.max_poll_ms,
        )
        self._consumer.subscribe(self._topics, listener=_Listener(self._revoked, self._assigned))
        self._polled = time.monotonic()
        try:
            await self._consumer.start()
        except (KafkaError, OSError) as error:
            await end_consumer("the membership", self._consumer)
            raise self._typed(error) from error
        except BaseException:
            await end_consumer("the membership", self._consumer)
            raise
        watch(self._consumer, self._note_end)

    async def stop(self) -> None:
        """Commit where each lane stands and leave the group."""
        if self._consumer is None:
            return
        if self._gate_open:
            self._gate_open = False
            await self._commit_last()
        if self._last_commit is not None:
            self._last_commit.cancel()  # if no coordinator answered, aiokafka would try for ever
            await asyncio.wait({self._last_commit})
        await end_consumer("the membership", self._consumer)

    def draining(self) -> None:
        """From the next assignment on this member has no lanes, unless all others drain as well."""
        self._assignor.draining = True

    async def poll(self) -> None:
        """Tell the group, for ever, that this member lives, while it makes progress. Raises what ends a membership."""
        while True:
            if self._ended is not None:  # a successor would have to join anew: a new process does that as well
                raise BrokerError(f"cannot take part in group {self._group}: {self._ended}")
            if self._progressing():
                try:
                    await self._consumer.getmany(timeout_ms=0)  # all partitions are paused: always empty
                except Exception as error:  # KafkaError, or whatever a background task of aiokafka's has ended with
                    if not (isinstance(error, KafkaError) and error.retriable):
                        raise self._typed(error) from error
                    log.warning("group_error", group=self._group, member=self._member, error=repr(error))
                self._polled = time.monotonic()
            await asyncio.sleep(POLL_S)

    async def commit(self) -> None:
        """Commit, for ever and every commit_ms, what became committable; nothing while the group rebalances."""
        while True:
            await asyncio.sleep(self._kafka.commit_ms / 1000)
            async with self._commit_lock:
                if self._gate_open:
                    await self._commit_changed()

    async def start_offset(self, topic: str, lane: int) -> int | None:
        """Where an owner of the lane starts: the committed offset, else the earliest. None: the lane has moved on."""
        while True:
            try:
                # The paused consumer looks up all its partitions' positions in one request, and never moves them.
                return int(await self._consumer.position(TopicPartition(topic, lane)))
            except IllegalStateError:
                return None
            except KafkaError as error:
                if not error.retriable:
                    raise self._typed(error) from error
                await asyncio.sleep(RETRY_BACKOFF_MS / 1000)

    def _note_end(self, why: str) -> None:
        self._ended = self._ended or why

    def _on_assignment(self) -> int:
        # Paused from inside the assignment, so that the fetcher has had no chance to send a request.
        self._consumer.pause(*self._consumer.assignment())
        # aiokafka shows the generation nowhere else; without it nobody can tell a kept lane from a returned one.
        return int(self._consumer._coordinator.generation)

    async def _revoked(self) -> None:
        self._gate_open = False
        if time.monotonic() - self._polled >= self._kafka.max_poll_ms / 1000:
            log.error(
                "lanes_given_up", group=self._group, member=self._member, why="no progress", ms=self._kafka.max_poll_ms
            )
            self._committed.clear()
            self._on_left()
            return
        await self._commit_last()

    def _assigned(self) -> None:
        self.rebalances += 1
        if not self._assignor.continuous:
            self._committed.clear()
        self._on_assigned(self._assignor.lanes, self._assignor.continuous)
        self._gate_open = True

    async def _commit_last(self) -> None:
        """Once more before the lanes may go, so that their next owners re-read little."""

        async def commit() -> None:
            async with self._commit_lock:  # the one in flight finishes first
                await self._commit_changed(leaving=True)

        # Neither cancelled nor waited for without end: aiokafka retries while no coordinator answers, and the group
        # waits for this member meanwhile.
        self._last_commit = asyncio.create_task(commit())
        await asyncio.wait({self._last_commit}, timeout=self._kafka.session_timeout_ms / 2000)

    async def commit_now(self, offsets: Mapping[tuple[str, int], tuple[int, str]]) -> bool:
        """Commit these; False: not possible now, as the group rebalances, or the broker refused. No timeout."""
        async with self._commit_lock:
            try:
                return self._gate_open and await self._commit(offsets)
            except IllegalStateError:  # a lane has moved on
                return False

    async def metadata(self, topic: str, lanes: Iterable[int]) -> dict[int, str]:
        """What stands beside the committed offset of each of these lanes. No timeout; raises KafkaError."""
        # aiokafka shows it nowhere else.
        found = await self._consumer._coordinator.fetch_committed_offsets(
            [TopicPartition(topic, lane) for lane in lanes]
        )
        return {partition.partition: kept.metadata for partition, kept in found.items()}

    async def _commit_changed(self, *, leaving: bool = False) -> None:
        offsets = self._committable(leaving)
        changed = {each: offset for each, offset in offsets.items() if self._committed.get(each) != offset}
        if changed:
            await self._commit(changed)

    async def _commit(self, changed: Mapping[tuple[str, int], tuple[int, str]]) -> bool:
        try:
            await self._consumer.commit({TopicPartition(*partition): offset for partition, offset in changed.items()})
        except CommitFailedError as error:
            # The broker had put this member out before we knew; aiokafka rejoins. What it refused is read again.
            self.commits_refused += 1
            log.warning("commit_refused", group=self._group, member=self._member, error=repr(error.__cause__))
        except KafkaError as error:
            log.warning("commit_failed", group=self._group, member=self._member, error=repr(error))
        else:
            self._committed.update(changed)
            return True
        return False

    def _typed(self, error: BaseException) -> BrokerError | ConfigError:
        if isinstance(error, InvalidSessionTimeoutError):
            return ConfigError(
                f"kafka.session_timeout_ms = {self._kafka.session_timeout_ms}: the broker refuses it; its bounds are "
                f"group.min.session.timeout.ms (6000 by default) and group.max.session.timeout.ms"
            )
        if isinstance(error, InconsistentGroupProtocolError):
            return BrokerError(
                f"group {self._group} has members that do not assign lanes as this program does; choose another group "
                f"name, or stop them"
            )
        return broker_error(self._kafka, f"take part in group {self._group}", error)


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka is untyped
    def __init__(self, revoked: Callable[[], Any], assigned: Callable[[], None]) -> None:
        self._revoked = revoked
        self._assigned = assigned

    async def on_partitions_revoked(self, revoked: Any) -> None:
        if revoked:  # empty at the first join: there was nothing
            await self._revoked()

    async def on_partitions_assigned(self, assigned: Any) -> None:  # noqa: ARG002  # the assignor knows them by lane
        self._assigned()
