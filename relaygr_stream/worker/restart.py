"""Finds the prefix KV again that the worker's last process left in its DRAM tier's file, but for users erased since.

    file: up to where every erasure was carried out ─► `worker-status` from there on ─► Restore (engine/commands.py)

It then asks the group for the lanes of these users (bus/balance.py).

An entry is in the tables only once every erasure since is known, and none is forgotten while the worker is away for
AWAY_MS: the topic keeps requests longer than that (wire/erase.py). They are found by offset, whatever the clocks say; a
log that has another record there, or none, is another log.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from typing import Final

import structlog

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.contents import read_from
from relaygr_stream.bus.topic_check import TopicRow
from relaygr_stream.bus.topics import describe_topics
from relaygr_stream.cache.kept import Restored
from relaygr_stream.cache.tier_file import Until
from relaygr_stream.cache.transit import ListUsers
from relaygr_stream.engine.commands import Restore
from relaygr_stream.errors import DecodeError
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.erase import AWAY_MS, CLOCK_MS, KEPT_MS, Erase, read_erase
from relaygr_stream.wire.records import HEADER_UNREADABLE, header
from relaygr_stream.wire.topic_files import TopicSet, lane_of_key
from relaygr_stream.wire.worker_status import StatusReader
from relaygr_stream.worker.device import Device

log = structlog.get_logger(__name__)

LAG: Final = "min.compaction.lag.ms"


async def find_again(kafka: Kafka, topics: TopicSet, reader: StatusReader, device: Device) -> list[int]:
    """Restore what the DRAM tier's file holds, and say in one line what was found and what was dropped, and why.

    Returns the lanes of the users found, as warm_lanes.

    Call it once erasures are read that come from now on, and before prefix KV do. Raises BrokerError, DeviceError.
    """
    file = device.runtime.tier_file
    if file is None:
        return []
    started, erases, drop = time.monotonic(), list[Erase](), file.dropped
    if file.holds:
        name = topics.worker_status.name
        statuses = next(row for row in await describe_topics(kafka) if row.topic.name == name)
        until = file.until
        if not (drop := _why_too_late(until, statuses)) and until is not None:
            erases, drop = await erased_since(kafka, name, until, reader)
    found: Restored = await device.thread.ask(Restore(erases, drop if file.holds else ""))
    log.info(
        "the DRAM tier is in a file",
        file=str(file.path),
        found=found.entries,
        dropped=found.dropped,
        why_dropped=drop,
        seconds=round(time.monotonic() - started, 3),
    )
    users: list[str] = await device.thread.ask(ListUsers())
    return await asyncio.to_thread(warm_lanes, users, topics.lanes)


def warm_lanes(users: Iterable[str], lanes: int) -> list[int]:
    """The lanes of these users (tenant_keys), that with the most first.

    Lanes with less than half of the mean are left out: their users were served for a worker that was away.
    """
    found = Counter(lane_of_key(user, lanes) for user in users)
    return [lane for lane, count in found.most_common() if 2 * count * len(found) >= found.total()]


def _why_too_late(until: Until | None, statuses: TopicRow) -> str:
    """Why erasures since the last process may be unknown; "": they are all on the topic."""
    assert statuses.found is not None, "verified"
    kept_ms = int(statuses.found.configs.get(LAG, statuses.topic.min_compaction_lag_ms or 0))
    if kept_ms < KEPT_MS:
        return (
            f"{statuses.topic.name} has {LAG}={kept_ms}, so users may have been erased unseen; "
            f"`relaygr topics apply --alter` sets {KEPT_MS}"
        )
    if until is None:
        return "the last process ended before it served, or is of an earlier release"
    away_ms = now_ms() - until.ms
    if away_ms > AWAY_MS:
        return f"the last process ended {away_ms / 6e4:.0f} minutes ago, users may have been erased unseen since"
    if away_ms < -CLOCK_MS:
        return (
            f"by the broker's clock the last process ends in {-away_ms / 6e4:.0f} minutes: a clock is wrong, or was "
            f"set back, and users may have been erased unseen"
        )
    return ""


async def erased_since(kafka: Kafka, topic: str, until: Until, reader: StatusReader) -> tuple[list[Erase], str]:
    """The requests behind this record; and why they may not be all, "": they are. One that is not believed may name
    any user: it was signed with another secret, or is a stranger's."""
    found, first = list[Erase](), None
    async for records in read_from(kafka, topic, 0, until.offset):
        for record in records:
            if first is None:
                first = Until(record.offset, record.timestamp_ms)
            try:
                if why := header(record.headers, HEADER_UNREADABLE):  # it may have been one
                    raise DecodeError("malformed", why.decode(errors="replace"))
                erase = read_erase(record, reader, fresh=False)
            except DecodeError as error:
                return [], f"users may have been erased unseen: {topic}, offset {record.offset}, a request: {error}"
            if erase is not None:
                found.append(erase)
    if first != until:
        return [], f"{topic} was made anew, or has lost records: users may have been erased unseen"
    return found, ""
