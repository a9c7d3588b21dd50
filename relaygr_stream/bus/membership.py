"""The membership plane: this member's place in a consumer group, and the commits that only a member may make.

This consumer joins the group and never fetches. aiokafka's protocol is eager: a rebalance revokes and reassigns every
lane, and lanes.py finds out which lanes really moved. Two traps shape the code. A commit that races a rebalance is
refused, and aiokafka then drops its membership and causes the next rebalance. A consumer that is not polled leaves the
group after max.poll.interval.ms.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import (
    CommitFailedError,
    IllegalStateError,
    InconsistentGroupProtocolError,
    InvalidSessionTimeoutError,
    KafkaError,
)

from relaygr_stream.bus.aiokafka_compat import broker_error, client_options, end_client
from relaygr_stream.bus.aiokafka_patches import RETRY_BACKOFF_MS
from relaygr_stream.bus.assignor import StickyLaneAssignor
from relaygr_stream.bus.group_members import GroupWatch
from relaygr_stream.bus.renewed import watch
from relaygr_stream.errors import BrokerError, ConfigError
from relaygr_stream.settings.schema import Kafka

log = structlog.get_logger(__name__)

#: The interval of polls. A poll takes 10 µs and keeps the membership for max_poll_interval_ms, at least 1000 ms.
POLL_S: Final = 0.2
#: Added to the time limit of a JoinGroup request, which waits at the broker for the slowest member.
JOIN_MARGIN_MS: Final = 5000


class LaneOwner(Protocol):
    """Who reads a member's lanes. It is called on the loop and must be quick."""

    @property
    def progressing(self) -> bool:
        """Whether the process makes progress; while it does not, the group gets no sign of life."""

    def on_assigned(self, lanes: frozenset[int], *, continuous: bool) -> None:
        """Own these lanes from now on. continuous: the former ones were owned without a break; if not, another member
        may have owned them meanwhile."""

    def committable(self, *, leaving: bool) -> Mapping[tuple[str, int], tuple[int, str]]:
        """The offset and metadata to commit for each owned partition; asked for just before a commit.

        leaving: the member may lose the lanes after the commit.
        """


class Membership:
    """One member of one group: it reports its lanes, commits for them, and loses them when progress stops.

    owner: reads the lanes. Raises ConfigError if the session timeout is shorter than three heartbeats.
    """

    def __init__(
        self,
        kafka: Kafka,
        *,
        topics: Sequence[str],
        group: str,
        member: str,
        capacity: float,
        owner: LaneOwner,
    ) -> None:
        if kafka.session_timeout_ms < 3 * kafka.heartbeat_interval_ms:
            raise ConfigError(
                f"kafka.session_timeout_ms = {kafka.session_timeout_ms} leaves no room for three heartbeats of "
                f"kafka.heartbeat_interval_ms = {kafka.heartbeat_interval_ms}: one lost heartbeat would cost the lanes"
            )
        self._kafka = kafka
        self._topics = topics
        self._group = group
        self._member = member
        self._owner = owner
        self._assignor = StickyLaneAssignor(capacity, self)
        self._consumer: Any = None
        self._watch = GroupWatch(kafka, group, member, topics)
        self._ended: str | None = None  # the background task of aiokafka that has ended
        self._polled = 0.0
        self._gate_open = False
        self._assigned_s = 0.0
        self._commit_lock = asyncio.Lock()
        self._last_commit: asyncio.Task[None] | None = None
        self._committed: dict[tuple[str, int], tuple[int, str]] = {}

    @property
    def strangers(self) -> str:
        """Who is in the group and is not of this program, for readiness; "" while nobody is."""
        return self._watch.strangers

    async def start(self, warm: Sequence[int] = ()) -> None:
        """Join the group; returns with the first assignment. warm: see MemberClaim.

        Raises BrokerUnavailable, BrokerError, ConfigError.
        """
        self._assignor.warm = tuple(warm)
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
            heartbeat_interval_ms=self._kafka.heartbeat_interval_ms,
            max_poll_interval_ms=self._kafka.max_poll_interval_ms,
        )
        self._consumer.subscribe(self._topics, listener=_Listener(self))
        self._polled = time.monotonic()
        try:
            await self._consumer.start()
        except (KafkaError, OSError) as error:
            if isinstance(error, InconsistentGroupProtocolError):
                await self._watch.who_refuses(self._consumer)
            await end_client("the membership", self._consumer)
            raise self._typed(error) from error
        except BaseException:
            await end_client("the membership", self._consumer)
            raise
        watch(self._consumer, self._note_end)

    async def stop(self) -> None:
        """Commit each lane's offset and leave the group."""
        if self._consumer is None:
            return
        if self._gate_open:
            self._gate_open = False
            await self._commit_last()
        if self._last_commit is not None:
            self._last_commit.cancel()  # without a coordinator, aiokafka would retry for ever
            await asyncio.wait({self._last_commit})
        await end_client("the membership", self._consumer)

    def draining(self) -> None:
        """Ask for no lanes in the next assignment; the member still gets some if all members drain."""
        self._assignor.draining = True

    def measured(self, levels: Mapping[int, int], speed: float) -> None:
        """State these loads and this speed (MemberClaim) in the next assignment. levels: by lane."""
        self._assignor.levels, self._assignor.speed = levels, speed

    def rebalance(self) -> None:
        """Ask the group for another assignment, if the last one is some time ago. All members keep reading what they
        keep."""
        # A member that has not heard of an assignment when the next one begins must take its lanes for lost. Within a
        # session timeout each has heard of it.
        settled_s = self._assigned_s + self._kafka.session_timeout_ms / 1e3
        if self._gate_open and time.monotonic() >= settled_s:  # else one is under way
            # aiokafka has no public method for it.
            self._consumer._coordinator.request_rejoin()

    async def poll(self) -> None:
        """Give the group a sign of life, for ever, while the process makes progress. Raises what ends a membership."""
        while True:
            if self._ended is not None:  # no replacement here: a new process has to join again in any case
                raise BrokerError(f"cannot take part in group {self._group}: {self._ended}")
            if self._owner.progressing:
                try:
                    await self._consumer.getmany(timeout_ms=0)  # always empty, since all partitions are paused
                except Exception as error:  # KafkaError, or any exception that ended a background task of aiokafka
                    if not (isinstance(error, KafkaError) and error.retriable):
                        raise self._typed(error) from error
                    log.warning(
                        "the group answers with an error", group=self._group, member=self._member, error=repr(error)
                    )
                self._polled = time.monotonic()
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """Ask for ever who is in the group; sets `strangers`."""
        await self._watch.run(self._consumer)

    async def commit(self) -> None:
        """Commit changed offsets every commit_interval_ms, for ever, but not while the group rebalances."""
        while True:
            await asyncio.sleep(self._kafka.commit_interval_ms / 1000)
            async with self._commit_lock:
                if self._gate_open:
                    await self._commit_changed()

    async def start_offset(self, topic: str, lane: int) -> int | None:
        """The start offset of the lane's owner: the committed offset, else the earliest. None: the lane is lost."""
        while True:
            try:
                # The paused consumer reads all its partitions' positions in one request, and never changes them.
                return int(await self._consumer.position(TopicPartition(topic, lane)))
            except IllegalStateError:
                return None
            except KafkaError as error:
                if not error.retriable:
                    raise self._typed(error) from error
                await asyncio.sleep(RETRY_BACKOFF_MS / 1000)

    def _note_end(self, why: str) -> None:
        self._ended = self._ended or why

    def on_assignment(self) -> int:
        """Another assignment begins (StickyLaneAssignor); returns the group's generation."""
        # Pausing within the assignment leaves the fetcher no chance to send a request.
        self._consumer.pause(*self._consumer.assignment())
        # aiokafka has no public attribute for the generation, which tells a kept lane from a returned one.
        return int(self._consumer._coordinator.generation)

    async def on_revoked(self) -> None:
        """The lanes may move now: commit, or give them up."""
        self._gate_open = False
        if time.monotonic() - self._polled >= self._kafka.max_poll_interval_ms / 1000:
            log.error(
                "lanes given up",
                group=self._group,
                member=self._member,
                why="no progress",
                ms=self._kafka.max_poll_interval_ms,
            )
            self._committed.clear()
            self._owner.on_assigned(frozenset(), continuous=False)
            return
        await self._commit_last()

    def on_assigned(self) -> None:
        """There is a new assignment, which the assignor has."""
        if not self._assignor.continuous:
            self._committed.clear()
        self._owner.on_assigned(frozenset(self._assignor.lanes), continuous=self._assignor.continuous)
        self._gate_open = True
        self._assigned_s = time.monotonic()
        self._watch.assigned.set()

    async def _commit_last(self) -> None:
        """Commit once more before the lanes may move, so that their next owners re-read few records."""

        async def commit() -> None:
            async with self._commit_lock:  # a commit in progress finishes first
                await self._commit_changed(leaving=True)

        # The wait is bounded and does not cancel the commit: without a coordinator aiokafka retries for ever, and the
        # group waits for this member.
        self._last_commit = asyncio.create_task(commit())
        await asyncio.wait({self._last_commit}, timeout=self._kafka.session_timeout_ms / 2000)

    async def commit_now(self, offsets: Mapping[tuple[str, int], tuple[int, str]]) -> bool:
        """Commit these offsets. Returns False while the group rebalances, or if the broker refuses. No time limit."""
        async with self._commit_lock:
            try:
                return self._gate_open and await self._commit(offsets)
            except IllegalStateError:  # a lane is lost
                return False

    async def metadata(self, partitions: Iterable[tuple[str, int]]) -> dict[tuple[str, int], str]:
        """The metadata of each partition's committed offset. No time limit. Raises KafkaError."""
        # aiokafka has no public method for it.
        found = await self._consumer._coordinator.fetch_committed_offsets(
            [TopicPartition(*each) for each in partitions]
        )
        return {(each.topic, each.partition): kept.metadata for each, kept in found.items()}

    async def _commit_changed(self, *, leaving: bool = False) -> None:
        offsets = self._owner.committable(leaving=leaving)
        changed = {each: offset for each, offset in offsets.items() if self._committed.get(each) != offset}
        if changed:
            await self._commit(changed)

    async def _commit(self, changed: Mapping[tuple[str, int], tuple[int, str]]) -> bool:
        try:
            await self._consumer.commit({TopicPartition(*partition): offset for partition, offset in changed.items()})
        except CommitFailedError as error:
            # The broker removed this member before it knew. aiokafka rejoins, and the records are read again.
            log.warning("commit refused", group=self._group, member=self._member, error=repr(error.__cause__))
        except KafkaError as error:
            log.warning("commit failed", group=self._group, member=self._member, error=repr(error))
        else:
            self._committed.update(changed)
            return True
        return False

    def _typed(self, error: BaseException) -> BrokerError | ConfigError:
        if isinstance(error, InvalidSessionTimeoutError):
            return ConfigError(
                f"kafka.session_timeout_ms = {self._kafka.session_timeout_ms}: the broker refuses it; set it between "
                f"its group.min.session.timeout.ms (6000 by default) and group.max.session.timeout.ms"
            )
        if isinstance(error, InconsistentGroupProtocolError):
            return BrokerError(
                self.strangers
                or f"group {self._group} has members with another assignment protocol than this program; choose "
                f"another group name, or stop them"
            )
        return broker_error(self._kafka, f"take part in group {self._group}", error)


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka is untyped
    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    async def on_partitions_revoked(self, revoked: Any) -> None:
        if revoked:  # empty at the first join
            await self._membership.on_revoked()

    async def on_partitions_assigned(self, assigned: Any) -> None:  # noqa: ARG002  # the assignor knows them by lane
        self._membership.on_assigned()
