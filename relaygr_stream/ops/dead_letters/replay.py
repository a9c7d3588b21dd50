"""Sends dead letters to their original topics, with their original key and headers, once.

A replayed message that fails again becomes a dead letter with a count in its headers, and is not replayed again. A
replayed dead letter gets a marker in the dead-letter topic, and is not replayed again either. So replaying never loops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal

from relaygr_stream.bus.away import Away
from relaygr_stream.bus.contents import read_all
from relaygr_stream.bus.producer import NO_LEADER, Producer
from relaygr_stream.bus.topics import verify_topics
from relaygr_stream.errors import REASONS, BrokerError, BrokerUnavailable, InputError
from relaygr_stream.ops.dead_letters.letter import Letter, letters_of
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.records import HEADER_REPLAY_OF, HEADER_REPLAYS
from relaygr_stream.wire.topic_files import LANE_TOPICS, TopicSet, partition_of


async def read_letters(kafka: Kafka, away: Away) -> list[Letter]:
    """Every dead letter, oldest first; joins no group. away: gets the partitions that no broker serves.

    Raises BrokerUnavailable, TopicError, ConfigError.
    """
    row = next(row for row in await verify_topics(kafka) if row.topic.name == f"{kafka.prefix}dead-letter")
    assert row.found is not None  # verified
    return letters_of(await read_all(kafka, row.topic.name, range(row.found.partitions), away))


def choose(
    letters: Sequence[Letter], *, addresses: Sequence[str], reason: str, origin: str, prefix: str, away: Away
) -> list[Letter]:
    """The dead letters with these addresses (none given: all), this reason and this origin topic ("": any).

    origin: with or without the topics' prefix. away: an address in one of these partitions is left out. Raises
    InputError for an address without a dead letter, and for a reason or an origin that is neither known nor a dead
    letter's.
    """
    origins = {each.origin_topic: each.origin_topic for each in letters}
    for name in LANE_TOPICS:
        origins[name] = origins[prefix + name] = prefix + name
    if origin and origin not in origins:
        raise InputError(f"--from {origin}: no such topic; the topics are {', '.join(LANE_TOPICS)}")
    if reason and reason not in (known := {*REASONS, *(letter.reason for letter in letters)} - {""}):
        raise InputError(f"--reason {reason}: no such reason; the reasons are {', '.join(sorted(known))}")
    by_address = {letter.address: letter for letter in letters}
    absent = [address for address in addresses if address not in by_address]
    if missing := [each for each in absent if not _is_away(each, f"{prefix}dead-letter", away)]:
        raise InputError(
            f"no dead letter at {', '.join(missing)}; write addresses PARTITION:OFFSET as `relaygr dead-letters list` "
            f"prints them; dead letters older than the topic's retention are deleted"
        )
    named = [by_address[address] for address in dict.fromkeys(addresses) if address in by_address]
    chosen = named if addresses else list(letters)
    return [
        letter
        for letter in chosen
        if (not reason or letter.reason == reason) and (not origin or letter.origin_topic == origins[origin])
    ]


def _is_away(address: str, topic: str, away: Away) -> bool:
    partition = address.partition(":")[0]
    return partition.isdecimal() and (topic, int(partition)) in away


Verdict = Literal[
    "replayed", "would replay", "replayed before", "came back", "no origin", "no value", "ended workers", "refused",
    "not taken",
]  # fmt: skip


def verdict_before(letter: Letter, topics: TopicSet, *, again: bool) -> Verdict:
    """Whether the dead letter would be replayed; if not, why. again: also if it was replayed before."""
    if letter.origin_topic not in {topic.name for topic in topics.all if topic.name != topics.dead_letter.name}:
        return "no origin"
    if letter.digest:
        return "no value"
    if letter.replayed and not again:
        return "replayed before"
    if letter.replays and not again:
        return "came back"
    if letter.reason == "crashed" and not again:
        return "ended workers"
    return "would replay"


def why(verdict: Verdict) -> str:
    """What an operator can do about a verdict; "": it is clear."""
    if verdict == "no value":
        return "the message was not kept; kafka.dead_letter_values = true keeps later ones (docs/how-to/kafka.md)"
    if verdict == "ended workers":
        return "it may end more of them, and its client has gone; try it apart from the fleet, or give --again"
    return ""


#: Told of each dead letter: its verdict, and what an error said.
Report = Callable[[Letter, Verdict, str], None]


async def replay(
    kafka: Kafka,
    topics: TopicSet,
    letters: Sequence[Letter],
    *,
    again: bool,
    report: Report,
    away: Away,
) -> bool:
    """Replay dead letters in order; each is acknowledged and marked before the next. Report every verdict.

    away: gets the partitions that took nothing within the request timeout. What is for them, for others of the same
    broker or for others without a leader is then not tried.
    Returns whether no message was refused. Raises BrokerError; verdicts reported before that are final. When cancelled,
    it first marks what it has sent.
    """
    clean = True
    largest = max(topic.max_message_bytes for topic in topics.all)
    async with Producer(kafka, client_id="relaygr-dead-letters", max_bytes=largest) as producer:
        target = _Target(producer, topics, away)
        for letter in letters:
            verdict = verdict_before(letter, topics, again=again)
            if verdict != "would replay":
                report(letter, verdict, why(verdict))
                continue
            sending = asyncio.create_task(_replay_one(target, letter, report))
            try:
                clean = await asyncio.shield(sending) and clean
            except asyncio.CancelledError:
                await sending  # raises where what was sent cannot be marked
                raise
    return clean


class _Target:
    """Where letters and markers are sent to. away: partitions that took nothing once, which are not tried again."""

    def __init__(self, producer: Producer, topics: TopicSet, away: Away) -> None:
        self.topics = topics
        self._producer = producer
        self._away = away
        self._silent: set[int] = set()  # brokers of these partitions

    def _is_away(self, topic: str, partition: int) -> bool:
        broker = self._producer.broker_of(topic, partition)
        if broker in self._silent or (self._silent and broker == NO_LEADER):
            self._away.add(topic, partition, broker)
        return (topic, partition) in self._away

    async def send(
        self, topic: str, value: bytes, *, key: bytes | None, partition: int, headers: list[tuple[str, bytes]]
    ) -> None:
        """Send and wait for the acknowledgement. Raises BrokerUnavailable, and notes the partition; BrokerError."""
        if self._is_away(topic, partition):
            raise BrokerUnavailable(f"no broker serves {topic} {partition}")
        try:
            await self._producer.send_and_wait(topic, value, key=key, partition=partition, headers=headers)
        except BrokerUnavailable:
            broker = self._producer.broker_of(topic, partition)
            self._away.add(topic, partition, broker)
            self._silent.add(NO_LEADER if broker is None else broker)
            raise

    async def mark(self, letter: Letter) -> None:
        """Mark a letter as replayed, beside it or, where that partition takes nothing, on any. Raises BrokerError."""
        topic, marker = self.topics.dead_letter.name, [(HEADER_REPLAY_OF, letter.address.encode())]
        try:
            await self.send(topic, b"", key=letter.key, partition=letter.partition, headers=marker)
        except BrokerUnavailable:
            await self._producer.send_and_wait(topic, b"", headers=marker)


async def _replay_one(target: _Target, letter: Letter, report: Report) -> bool:
    """Send and mark one dead letter; False: it is refused."""
    # By its key if it has one: a message from the wrong partition then reaches the right one.
    partition = letter.origin_partition
    if letter.key is not None or partition < 0:
        counts = {topic.name: topic.partitions for topic in target.topics.all}
        partition = partition_of(letter.key or b"", counts[letter.origin_topic])
    headers = [*letter.headers, (HEADER_REPLAYS, str(letter.replays + 1).encode())]
    try:
        await target.send(letter.origin_topic, letter.value, key=letter.key, partition=partition, headers=headers)
    except BrokerUnavailable as error:
        report(letter, "not taken", str(error))
        return True
    except BrokerError as error:
        report(letter, "refused", str(error))
        return False
    report(letter, "replayed", "")
    try:
        await target.mark(letter)
    except BrokerError as error:
        raise BrokerError(
            f"{letter.address} was replayed, and could not be marked as that: {error}. Nothing more is replayed, since "
            f"each run would send all again; this needs WRITE on {target.topics.dead_letter.name}"
        ) from error
    return True
