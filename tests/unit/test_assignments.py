"""Assignments as a record: the newest counts, whatever else is on the topic, and nothing that is not to be believed."""

from __future__ import annotations

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from relaygr_stream.bus.assignments import AssignmentsTail, read_assignments, write_assignments
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.routes import read_routes
from relaygr_stream.bus.topics import topic_exists
from relaygr_stream.errors import AccessDenied, BrokerError, DecodeError
from relaygr_stream.ops.scenarios import make_groups
from relaygr_stream.settings import Scenario, Settings
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.settings.worker import Handover
from relaygr_stream.wire.assignments import (
    HEADERS,
    KEY,
    MAX_WORKERS,
    Assignments,
    encode_assignments,
    newer_assignments,
)
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.routes import MAX_AHEAD_MS, Routes, encode_routes, routes_topic
from relaygr_stream.wire.signature import Signer
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader
from tests.unit.test_routes import followed
from tests.waiting import until

TOPIC = "relaygr.routes"
NOW_MS = int(time.time() * 1e3)


def of(workers: dict[str, str], epoch: int = 7) -> Assignments:
    return Assignments(epoch=epoch, sent_ms=NOW_MS, planner="p", workers=workers)


def assignments(epoch: int = 7, **workers: str) -> Assignments:
    return of(workers or {"w1": "feed"}, epoch)


def naming(checkpoint: str) -> Assignments:
    return msgspec.structs.replace(assignments(), checkpoints={"next": checkpoint})


def record(message: object = None, key: bytes | None = KEY, headers: tuple[tuple[str, bytes], ...] = HEADERS) -> Record:
    value = message if isinstance(message, bytes) else msgspec.msgpack.encode(message or assignments())
    return Record(TOPIC, 0, 0, 0, key, value, headers)


@given(st.lists(st.integers(0, 5)))
def test_the_highest_epoch_counts_in_any_order(epochs: list[int]) -> None:
    known: Assignments | None = None
    for at, epoch in enumerate(epochs):
        known = newer_assignments(record(assignments(epoch, w=f"s{at}")), StatusReader(), known)
    if known is None:
        assert not epochs
    else:
        last = max(range(len(epochs)), key=lambda at: (epochs[at], at))
        assert (known.epoch, known.workers) == (max(epochs), {"w": f"s{last}"})


def test_the_next_epoch_is_the_clocks_or_one_more_than_the_last() -> None:
    first = Assignments.after(None, "p", {"w1": "feed"}, 1000)
    assert (first.epoch, first.sent_ms, first.workers) == (1000, 1000, {"w1": "feed"})
    assert Assignments.after(first, "p", {}, 2000).epoch == 2000
    assert Assignments.after(first, "p", {}, 500).epoch == 1001, "a planner whose clock is behind"


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (record(key=b"feed"), "the key of assignments"),
        (record(key=None), "the key of assignments"),
        (record(assignments(epoch=NOW_MS + 2 * MAX_AHEAD_MS)), "more than a day ahead"),
        (record(assignments(w1="Feed.x")), "malformed"),
        (record(assignments(w1="f" * 25)), "malformed"),
        (record(of({"w" * 257: "feed"})), "malformed"),
        (record({**msgspec.to_builtins(assignments()), "workers": {"": "feed"}}), "malformed"),
        (record(of({f"w{at}": "feed" for at in range(MAX_WORKERS + 1)})), "malformed"),
        (record(assignments(epoch=-1)), "malformed"),
        (record({**msgspec.to_builtins(assignments()), "home": "a.b"}), "malformed"),
        (record(naming("models/new")), "malformed"),
        (record(naming("/models/\0")), "malformed"),
        (record(naming("mine:make")), "malformed"),
        (record(naming("/" + "m" * 4096)), "malformed"),
        (record(msgspec.structs.replace(assignments(), checkpoints={f"g{at}": "/" for at in range(17)})), "malformed"),
        (record({"v": 99, "min_v": 99}), "unknown_version"),
        (record(b"\x00"), "malformed"),
    ],
)
def test_a_record_that_is_not_to_be_believed_is_refused(bad: Record, says: str) -> None:
    with pytest.raises(DecodeError, match=says):
        newer_assignments(bad, StatusReader(), assignments())


def test_other_records_of_the_topic_are_passed_and_others_pass_this_one() -> None:
    known, routes = assignments(), Routes.of_one("", 8)
    for other in (record(encode_routes(routes), b"default", ()), record(None)._replace(value=None)):
        assert newer_assignments(other, StatusReader(), known) is known
    assert followed(record(encode_routes(routes), b"default", ()), record()) == {"": routes}


def test_a_planner_of_a_later_release_is_obeyed() -> None:
    later = {**msgspec.to_builtins(assignments()), "v": 9, "min_v": 1, "why": "tides"}
    assert newer_assignments(record(later), StatusReader(), None) == msgspec.structs.replace(
        assignments(), v=9, min_v=1
    )


def test_with_a_secret_only_signed_ones_count() -> None:
    signer, value = Signer("a secret of a fleet"), encode_assignments(assignments())
    reader = StatusReader(signer=signer)
    signed = record(value, headers=tuple(signer.sign(TOPIC, KEY, value, [*HEADERS])))
    assert newer_assignments(signed, reader, None) == assignments()
    for other in (record(value), signed._replace(value=encode_assignments(assignments(8))), signed._replace(topic="t")):
        with pytest.raises(DecodeError, match="no signature"):
            newer_assignments(other, reader, None)


async def test_why_the_topic_cannot_be_read_is_told_once(embedded_settings: Kafka) -> None:
    denied = AccessDenied("lacks an ACL")
    why: BrokerError | None = None

    async def exists() -> bool:
        if why is not None:
            raise why
        return False

    settings = Settings(kafka=embedded_settings)
    reader = StatusReader.from_settings(settings, load_topics(embedded_settings))
    tail = AssignmentsTail(embedded_settings, "routes", reader, exists, lambda _: None)
    with capture_logs() as logs:
        for said in (denied, denied, BrokerError("another"), denied, None, denied, None):
            why = said
            await tail.start()
    assert [line["error"] for line in logs] == ["lacks an ACL", "another", "lacks an ACL", "lacks an ACL"]


async def test_what_is_written_is_read_and_followed_and_routes_stay(embedded_settings: Kafka) -> None:
    """From before the topic is there, past hostile records."""
    settings = Settings(
        kafka=embedded_settings, scenarios=(Scenario(name="feed"),), handover=Handover(secret="a secret of a fleet")
    )
    topics = load_topics(embedded_settings)
    reader, name, seen = (
        StatusReader.from_settings(settings, topics),
        routes_topic(topics).name,
        list[Assignments | None](),
    )
    await reader.prepare()
    assert await read_assignments(embedded_settings, topics, reader) is None

    async def exists() -> bool:
        return await topic_exists(embedded_settings, routes_topic(topics))

    tail = AssignmentsTail(embedded_settings, name, reader, exists, seen.append)
    await tail.start()
    assert (tail.newest, seen) == (None, [])
    await make_groups(settings, lambda _: None)
    async with Producer(embedded_settings, client_id="test") as producer:
        await write_assignments(producer, topics, reader, assignments(7))
        await tail.start()
        assert tail.newest == assignments(7)
        for hostile in (record(assignments(8)), record(b"\x00")):
            await producer.send_and_wait(name, hostile.value, key=KEY, headers=[*HEADERS])
        await write_assignments(producer, topics, reader, assignments(9, w2="ads"))
        await until(lambda: len(seen) == 2)
    await tail.stop()
    assert seen == [assignments(7), assignments(9, w2="ads")]
    assert await read_assignments(embedded_settings, topics, reader) == assignments(9, w2="ads")
    assert (await read_routes(embedded_settings, topics, reader))["feed"].groups == ("feed",)
