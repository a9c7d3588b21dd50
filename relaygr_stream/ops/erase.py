"""Removes a user everywhere: the history store, both tiers of every worker, the triggers' memory, the dead letters.

    store ─► workers and triggers (wire/erase.py), until each has said so ─► dead letters ─► what the logs still hold

In this order: a worker that reads the history once more finds none.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgpack

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.away import Away
from relaygr_stream.bus.contents import read_all
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.routes import read_routes
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topic_check import TopicRow
from relaygr_stream.bus.topics import delete_before, topic_exists, verify_topics
from relaygr_stream.errors import BrokerError, DecodeError
from relaygr_stream.settings.scenarios import RESERVE
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.wire.erase import KEY_PREFIX, KIND, Erase, encode_erase
from relaygr_stream.wire.messages import WorkerStatus, tenant_key
from relaygr_stream.wire.records import HEADER_KIND, HEADER_REASON, HEADER_REPLAY_OF, Record
from relaygr_stream.wire.routes import OWN, Routes, group_settings
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.trigger_status import TriggerStatus, read_trigger
from relaygr_stream.wire.worker_status import StatusReader

#: Statuses that a living worker has sent by then, and after which the fleet counts as known.
PERIODS: Final = 4
#: Least time to listen, in seconds: a trigger states itself once a second; a tail that wakes late, a busy broker.
LISTEN_S: Final = 3.0


@dataclass
class Erased:
    """What was done. confirmed, triggers: workers and triggers that said so; …unconfirmed: living ones that did not say
    so in time; unread: how many of their statuses this process does not believe; unasked: why none was asked;
    letters_left: why letters are left; away: partitions of dead letters that no broker serves. groups: the settings of
    each group of workers that was asked."""

    confirmed: list[str] = field(default_factory=list)
    unconfirmed: list[str] = field(default_factory=list)
    triggers: list[str] = field(default_factory=list)
    triggers_unconfirmed: list[str] = field(default_factory=list)
    unread: int = 0
    unasked: str = ""
    letters: int = 0
    letters_left: str = ""
    away: Away = field(default_factory=Away)
    groups: list[Settings] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether nothing is left but what the logs hold."""
        unsaid = self.unconfirmed or self.triggers_unconfirmed or self.unread or self.unasked
        return not (unsaid or self.letters_left or self.away)


async def erase_from_fleet(settings: Settings, user_id: str, tenant: str, wait_s: float) -> Erased:
    """Have every worker and trigger drop the user, then remove the dead letters. wait_s: how long to wait for them.

    Raises BrokerError, TopicError, ConfigError.
    """
    done = Erased()
    topics = load_topics(settings.kafka)
    reader = StatusReader.from_settings(settings, topics)
    await reader.prepare()
    routes = {"": Routes.of_one(OWN, topics.lanes), **await read_routes(settings.kafka, topics, reader)}
    # Those without users, too: they may keep something of them.
    parts = {part.group: part for each in routes.values() for part in each.parts}
    for part in parts.values():
        group = group_settings(settings, part.group, part.lanes)
        if part.group == OWN or await topic_exists(group.kafka, load_topics(group.kafka).worker_status):
            await _erase_from_group(group, user_id, tenant, wait_s, done)
            done.groups.append(group)
    return done


async def _erase_from_group(settings: Settings, user_id: str, tenant: str, wait_s: float, done: Erased) -> None:
    rows = {row.topic.name: row for row in await verify_topics(settings.kafka)}
    try:
        await _ask(settings, tenant_key(tenant, user_id), wait_s, done)
    except BrokerError as error:  # dead letters can be removed all the same
        done.unasked = str(error)
    try:
        done.letters += await _remove_letters(settings.kafka, rows, user_id, tenant, done.away)
    except BrokerError as error:
        done.letters_left = str(error)


async def _ask(settings: Settings, user_key: str, wait_s: float, done: Erased) -> None:
    topics = load_topics(settings.kafka)
    reader, topic = StatusReader.from_settings(settings, topics), topics.worker_status.name
    await reader.prepare()
    living: dict[_Asked, WorkerStatus | TriggerStatus] = {}
    confirmed: set[tuple[_Asked, int]] = set()  # with its incarnation; later statuses may list others in its place
    erase_id = secrets.token_hex(16)

    def on_records(records: list[Record]) -> None:
        for record in records:
            try:
                status = reader.read(record) or read_trigger(record, reader)
            except DecodeError:
                done.unread += 1
                continue
            if isinstance(status, WorkerStatus) and status.scenario == RESERVE:
                continue  # it stands by, and has no users
            if isinstance(status, WorkerStatus | TriggerStatus):
                asked = _Asked(isinstance(status, TriggerStatus), status.name)
                living[asked] = status
                if erase_id in (status.erased or ()):
                    confirmed.add((asked, status.incarnation))
                if status.state == "stopped":
                    del living[asked]

    key = (KEY_PREFIX + erase_id).encode()
    kind = [(HEADER_KIND, KIND.encode())]

    async def send(producer: Producer, value: bytes | None) -> None:
        await producer.send_and_wait(topic, value, key=key, headers=reader.signed(topic, key, value, kind))

    def unconfirmed() -> set[_Asked]:
        return {asked for asked, status in living.items() if (asked, status.incarnation) not in confirmed}

    erase = Erase.request(erase_id, user_key, now_ms(), reader)
    async with (
        TopicTail(settings.kafka, topic, [0], "latest", on_records),
        Producer(settings.kafka, client_id="relaygr-erase") as producer,
    ):
        await send(producer, encode_erase(erase))
        known = max(LISTEN_S, PERIODS * settings.worker.status_interval_ms / 1e3)
        started = time.monotonic()
        while (waited := time.monotonic() - started) < max(wait_s, known):
            if waited >= known and not unconfirmed():
                break
            await asyncio.sleep(0.05)
        await send(producer, None)
    left = unconfirmed()
    for asked in sorted(living):
        lists = (done.confirmed, done.triggers), (done.unconfirmed, done.triggers_unconfirmed)
        lists[asked in left][asked.trigger].append(asked.name)


class _Asked(NamedTuple):
    trigger: bool  # else a worker
    name: str


# ---- dead letters ----


async def _remove_letters(kafka: Kafka, rows: dict[str, TopicRow], user_id: str, tenant: str, away: Away) -> int:
    """Remove the user's dead letters, and return their number. away: gets the partitions that no broker serves.

    A log loses its beginning only. So the others' letters before the user's last one are written anew, at its end, and
    everything up to that last one is deleted. They get new addresses; markers of replays follow them.

    Raises BrokerError if the user is named afterwards: another command wrote letters anew at the same time.
    """
    topic = load_topics(kafka).dead_letter
    found = rows[topic.name].found
    assert found is not None  # verified
    lanes = range(found.partitions)
    records = await read_all(kafka, topic.name, lanes, away)
    his = [record for record in records if names_user(record, user_id, tenant)]
    last = {lane: max(each.offset for each in his if each.lane == lane) for lane in {each.lane for each in his}}
    if not last:
        return 0
    await delete_before(kafka, topic.name, dict.fromkeys(last, 0))  # deletes nothing: can this broker delete records?
    gone = {(each.lane, each.offset) for each in his}
    others = [each for each in records if (each.lane, each.offset) not in gone]
    async with Producer(kafka, client_id="relaygr-erase", max_bytes=topic.max_message_bytes) as producer:
        await _write_anew(producer, topic.name, others, last)
    await delete_before(kafka, topic.name, {lane: offset + 1 for lane, offset in last.items()})
    served = [lane for lane in lanes if (topic.name, lane) not in away]
    if any(names_user(record, user_id, tenant) for record in await read_all(kafka, topic.name, served, away)):
        raise BrokerError("another command wrote dead letters anew at the same time; run this one again, alone")
    return len(his)


async def _write_anew(producer: Producer, topic: str, records: Sequence[Record], last: Mapping[int, int]) -> None:
    """Write the letters before `last` of their lane at its end, and all markers that name one of them.

    A letter that is there already, from a run that ended half-way, is not written again.
    """
    there = {_content(record): record.offset for record in records if record.offset > last.get(record.lane, -1)}
    moved: dict[bytes, bytes] = {}  # PARTITION:OFFSET of letters, for the markers that name them
    markers = [record for record in records if HEADER_REPLAY_OF in dict(record.headers)]
    for record in records:
        if record.offset < last.get(record.lane, -1) and HEADER_REPLAY_OF not in dict(record.headers):
            at = there.get(_content(record))
            if at is None:
                at = await producer.send_and_wait(
                    topic, record.value, key=record.key, partition=record.lane, headers=_sent(record.headers)
                )
            moved[f"{record.lane}:{record.offset}".encode()] = f"{record.lane}:{at}".encode()
    for record in markers:
        names = dict(record.headers)[HEADER_REPLAY_OF] or b""
        if names in moved or record.offset < last.get(record.lane, -1):
            headers = [(name, value) for name, value in _sent(record.headers) if name != HEADER_REPLAY_OF]
            headers.append((HEADER_REPLAY_OF, moved.get(names, names)))
            await producer.send_and_wait(topic, record.value, key=record.key, partition=record.lane, headers=headers)


def _content(record: Record) -> tuple[object, ...]:
    return record.lane, record.key, record.value, record.headers


def _sent(headers: Iterable[tuple[str, bytes | None]]) -> list[tuple[str, bytes]]:
    return [(name, value or b"") for name, value in headers]


def names_user(record: Record, user_id: str, tenant: str) -> bool:
    """Whether a dead letter, or the marker of a replay, names this user: its key, or the message in it.

    A letter without its message names no tenant: the user id alone counts.
    """
    headers = dict(record.headers)
    stated = _stated(record.value) if HEADER_REASON in headers else None
    if stated is not None:
        return stated == (user_id, tenant)
    return record.key == user_id.encode()


def _stated(value: bytes | None) -> tuple[str, str] | None:
    """User and tenant in a message, if it can be read so far."""
    try:
        fields = msgpack.unpackb(value or b"", strict_map_key=False)
        user, tenant = fields["user_id"], fields.get("tenant", "")
    except Exception:  # hostile bytes: msgpack raises ValueError, its own errors, RecursionError
        return None
    return (user, tenant) if isinstance(user, str) and isinstance(tenant, str) else None


def retained(settings: Settings) -> list[tuple[str, float]]:
    """Each topic whose messages name users, and the hours for which its file keeps them under traffic."""
    topics = load_topics(settings.kafka)
    held = (topics.retrieval, topics.pre_infer, topics.ranking)
    return [(topic.name, (topic.retention_ms + (topic.segment_ms or 0)) / 3.6e6) for topic in held]
