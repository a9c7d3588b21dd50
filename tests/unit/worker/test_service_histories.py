"""A whole worker whose messages refer to histories in a store, beside messages that carry them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.history.sqlite_store import SqliteStore
from relaygr_stream.settings.schema import History, Kafka, Settings
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.history import HistoryReference
from relaygr_stream.wire.messages import PreInferSignal, RankingRequest, with_version
from relaygr_stream.wire.records import HEADER_KIND, KIND_DELEGATED
from tests.unit.worker.services import Peer, history, worker_on, worker_settings
from tests.waiting import until


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    opened = SqliteStore(tmp_path / "histories", 20.0)
    yield opened
    await opened.close()


def settings_with(kafka: Kafka, store: str, **changes: Any) -> Settings:
    settings = worker_settings(kafka)
    given = History(**{"store": store, "timeout_ms": 10_000.0, **changes})
    return msgspec.structs.replace(settings, history=given)


def sqlite(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'histories'}"


async def signal(peer: Peer, request: str, user: str, reference: HistoryReference, **changes: Any) -> int:
    message = PreInferSignal(
        request_id=request,
        user_id=user,
        prefix=Behaviours(),
        admitted_ms=now_ms(),
        **{"life_ms": 60_000.0, **changes},
        **with_version(reference),
    )
    delegated = message.delegate is not msgspec.UNSET
    topic, kind = (peer.topics.ranking, KIND_DELEGATED) if delegated else (peer.topics.pre_infer, "")
    headers = [(HEADER_KIND, kind.encode())] if kind else []
    return await peer.producer.send_and_wait(topic.name, encode(message), key=user.encode(), headers=headers)


async def rank(peer: Peer, request: str, user: str, reference: HistoryReference, **changes: Any) -> bytes:
    message = RankingRequest(
        request_id=request,
        user_id=user,
        prefix=Behaviours(),
        candidates=pack_items(range(5)),
        sent_ms=now_ms(),
        **{"timeout_ms": 30_000.0, **changes},
        **with_version(reference),
    )
    return await peer.send_ranking(encode(message), key=user.encode())


async def test_scores_are_those_of_messages_that_carry_all(
    embedded_settings: Kafka, tmp_path: Path, store: SqliteStore
) -> None:
    settings = settings_with(embedded_settings, sqlite(tmp_path))
    suffix = Behaviours.from_arrays([1, 2], [0, 0], [10**6, 10**6 + 5])
    async with Peer(embedded_settings) as peer, worker_on(settings) as w:
        for number, length in enumerate((60, 60, 90, 130)):  # announced, as it was, longer, longer
            await store.replace("u", "", history("u", length))
            found = await store.reference("u")
            assert found is not None
            reference = HistoryReference.from_behaviours(history("u", length), found.version, (60, 90))
            await signal(peer, f"r{number}", "u", reference)
            await until(lambda: w.total("histories") == 2 * number + 1)  # noqa: B023
            before = w.total("history_reads")
            by_reference = await peer.reply(await rank(peer, f"r{number}", "u", reference, suffix=suffix))
            assert w.total("history_reads") == before  # a ranking behind its announcement reads nothing
            assert by_reference.outcome in ("hbm", "joined")
            assert by_reference.timings.computed_tokens == 0 or by_reference.outcome == "joined"
            carried = await peer.reply(await peer.rank(f"c{number}", "u", length, suffix=suffix, mode="full"))
            np.testing.assert_allclose(by_reference.matrix(), carried.matrix(), rtol=1e-5, atol=1e-6)
            prefix_kv = await peer.reply(await peer.rank(f"d{number}", "u", length, suffix=suffix))
            assert prefix_kv.outcome == "hbm"  # messages of both kinds share prefix KV
        assert w.total("history_reads") == 3
        assert w.total("history_behaviours") == 130  # what was there was not read again
        missed = await peer.reply(await rank(peer, "late", "v", await store.replace("v", "", history("v", 70))))
        assert (missed.status, missed.outcome) == ("ok", "full")
        full = await peer.reply(await peer.rank("late2", "v", 70, mode="full"))
        np.testing.assert_allclose(missed.matrix(), full.matrix(), rtol=1e-5, atol=1e-6)


async def test_no_scores_from_another_history_than_the_reference_says(
    embedded_settings: Kafka, tmp_path: Path, store: SqliteStore
) -> None:
    settings = settings_with(embedded_settings, sqlite(tmp_path), max_retries=0)
    async with Peer(embedded_settings) as peer, worker_on(settings) as w:
        there = await store.replace("u", "", history("other", 50))
        wanted = HistoryReference.from_behaviours(history("u", 50))
        await signal(peer, "r", "u", wanted)
        reply = await peer.reply(await rank(peer, "r", "u", wanted))
        assert (reply.status, reply.scores) == ("failed", b"")
        assert wanted.digest.hex() in reply.detail
        assert there.digest.hex() in reply.detail
        unknown = await peer.reply(await rank(peer, "r2", "nobody", wanted))
        assert unknown.status == "failed"
        assert "0 behaviours" in unknown.detail
        older = Behaviours.from_arrays([1], [0], [0])
        rejected = await peer.reply(await rank(peer, "r3", "u", there, suffix=older))
        assert (rejected.status, rejected.detail) == ("rejected", "the suffix starts before the history ends")
        too_long = msgspec.structs.replace(there, length=257)
        refused = await peer.reply(await rank(peer, "r4", "u", too_long))
        assert refused.status == "rejected"
        assert "relay.max_prefix_tokens" in refused.detail
        await store.replace("f", "", with_a_column(history("f", 5)))
        found = await store.reference("f")
        assert found is not None
        column = await peer.reply(await rank(peer, "r5", "f", found))
        assert column.status == "rejected"
        assert "'x:int32'" in column.detail
        assert (await peer.reply(await rank(peer, "fine", "u", there))).status == "ok"
        await until(lambda: w.worker.requests.held_bytes == 0, "released")
        assert peer.dead == []


def with_a_column(behaviours: Behaviours) -> Behaviours:
    return msgspec.structs.replace(behaviours, columns={"x:int32": bytes(4 * len(behaviours))})


async def test_a_delegate_prefills_a_history_by_reference(
    embedded_settings: Kafka, tmp_path: Path, store: SqliteStore
) -> None:
    """Such a signal is of no lane, so none that this worker owns."""
    async with Peer(embedded_settings) as peer, worker_on(settings_with(embedded_settings, sqlite(tmp_path))) as w:
        for number in range(2):  # read from the store; kept
            reference = await store.append("u", "", history("u", 60 + 30 * number).slice(60 * number, 60 + 30 * number))
            await signal(peer, f"r{number}", "u", reference, delegate="w9")
            await until(lambda: w.total("histories") == 2 * number + 1)  # noqa: B023
            found = await peer.reply(await rank(peer, f"r{number}", "u", reference, hops=1))
            assert found.outcome in ("hbm", "joined")


async def test_a_worker_without_a_store_says_so(embedded_settings: Kafka) -> None:
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)) as w:
        reference = HistoryReference.from_behaviours(history("u", 50))
        await signal(peer, "r", "u", reference)
        reply = await peer.reply(await rank(peer, "r", "u", reference))
        assert reply.status == "failed"
        assert "history.store" in reply.detail
        await until(lambda: w.worker.requests.held_bytes == 0, "released")


class Gate:
    """A store of a user's own: it answers when a test says so."""

    open = True
    reading = 0
    left = -1  # reads that were under way when it was closed

    def __init__(self, settings: History) -> None:
        pass

    async def reference(self, user_id: str, tenant: str = "") -> HistoryReference | None:
        return HistoryReference.from_behaviours(history(user_id, 100))

    async def read(self, user_id: str, tenant: str, version: int, start: int, stop: int) -> Behaviours:
        Gate.reading += 1
        try:
            await until(lambda: Gate.open)
        finally:
            Gate.reading -= 1
        return history(user_id, 256).slice(start, stop)

    async def close(self) -> None:
        Gate.left = Gate.reading


GATED = f"{__name__}:Gate"


async def test_waiting_for_the_store_stops_nothing_else_and_ends_at_the_deadline(embedded_settings: Kafka) -> None:
    async with Peer(embedded_settings) as peer, worker_on(settings_with(embedded_settings, GATED)) as w:
        Gate.open = False
        try:
            slow = await rank(peer, "slow", "u", HistoryReference.from_behaviours(history("u", 100)))
            soon = await rank(peer, "soon", "u", HistoryReference.from_behaviours(history("u", 50)), timeout_ms=300.0)
            assert (await peer.reply(soon)).status == "deadline_exceeded"
            assert (await peer.reply(await peer.rank("carried", "u", 40))).status == "ok"
            assert slow not in peer.replies
        finally:
            Gate.open = True
        assert (await peer.reply(slow)).status == "ok"
        await until(lambda: w.worker.requests.held_bytes == 0, "released")


async def test_signals_that_wait_for_their_history_count_as_pinned(embedded_settings: Kafka) -> None:
    """A status states all signals below its offset as pinned: a trigger would admit too much otherwise."""
    async with Peer(embedded_settings) as peer, worker_on(settings_with(embedded_settings, GATED)) as w:
        lane, nbytes = peer.lane("u"), w.runtime.cache.nbytes(100)
        Gate.open = False
        try:
            await signal(peer, "r", "u", HistoryReference.from_behaviours(history("u", 100)))
            await until(lambda: stated(peer, lane)[0] == 1)
            assert stated(peer, lane)[1] == nbytes
            assert len(w.runtime.scheduler.pins) == 0
        finally:
            Gate.open = True
        await until(lambda: w.worker.core.fetching_tokens(lane) == [])
        read = len(peer.statuses)
        await until(lambda: len(peer.statuses) > read + 2)
        # A status that is made while the history comes may count the signal twice.
        await until(lambda: stated(peer, lane)[1] == nbytes, "stated as pinned, once")


def stated(peer: Peer, lane: int) -> tuple[int, int]:
    """The next offset and the pinned bytes of the lane in the newest status that has it."""
    lanes = (each for status in reversed(peer.statuses) for each in status.lanes if each.lane == lane)
    return next(((each.pre_infer_offset, each.pinned_bytes) for each in lanes), (0, 0))


async def test_an_expired_signal_leaves_nothing_behind(embedded_settings: Kafka) -> None:
    async with Peer(embedded_settings) as peer, worker_on(settings_with(embedded_settings, GATED)) as w:
        Gate.open = False
        try:
            await signal(peer, "r", "u", HistoryReference.from_behaviours(history("u", 100)), life_ms=200.0)
            await until(lambda: w.total("histories") == 1)
            assert w.worker.requests.held_bytes == 0
            assert w.worker.core.fetching_tokens(peer.lane("u")) == []
        finally:
            Gate.open = True


async def test_a_worker_that_stops_ends_its_reads_before_it_leaves_the_store(embedded_settings: Kafka) -> None:
    async with Peer(embedded_settings) as peer, worker_on(settings_with(embedded_settings, GATED)) as w:
        Gate.open, Gate.left = False, -1
        try:
            await signal(peer, "r", "u", HistoryReference.from_behaviours(history("u", 100)))
            await until(lambda: Gate.reading == 1)
            await w.end()
            assert Gate.left == 0
        finally:
            Gate.open = True


async def test_a_device_that_fails_answers_those_that_wait_for_the_store_once(embedded_settings: Kafka) -> None:
    from relaygr_stream.errors import DeviceError

    settings = settings_with(embedded_settings, GATED)
    async with Peer(embedded_settings) as peer, worker_on(settings) as w:
        Gate.open = False
        try:
            waiting = await rank(peer, "waiting", "u", HistoryReference.from_behaviours(history("u", 100)))
            await until(lambda: w.worker.core.in_flight)
            w.worker.device.failed.set_exception(DeviceError("broken by a test"))
            reply = await peer.reply(waiting)
            assert (reply.status, reply.detail) == ("failed", "broken by a test")
            await until(w.task.done)
            assert isinstance(w.task.exception(), DeviceError)
        finally:
            Gate.open = True
        assert len(peer.replies[waiting]) == 1
