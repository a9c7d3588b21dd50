"""Histories by reference: what is kept, what is read, and that nothing is computed from a wrong one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from prometheus_client import CollectorRegistry

from relaygr_stream.errors import HistoryMismatch, HistoryUnavailable
from relaygr_stream.history.packed import joined
from relaygr_stream.history.sqlite_store import SqliteStore
from relaygr_stream.settings.schema import History
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.erase import Erase, user_mark
from relaygr_stream.wire.history import HistoryReference, positioned
from relaygr_stream.worker.histories import OBJECT_BYTES, Histories, HistoryMetrics
from tests.properties import examples
from tests.unit.history.behaviours import history
from tests.waiting import until


class Watched(SqliteStore):
    """The SQLite store, which notes what is read, and answers something else where a test says so."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reads: list[tuple[int, int]] = []
        self.answers: list[Any] = []  # the next ones, in place of what is there
        self.gate = asyncio.Event()
        self.gate.set()

    async def read(self, user_id: str, tenant: str, version: int, start: int, stop: int) -> Behaviours:
        self.reads.append((start, stop))
        await self.gate.wait()
        if not self.answers:
            return await super().read(user_id, tenant, version, start, stop)
        answer: Any = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return cast(Behaviours, answer)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Watched]:
    watched = Watched(tmp_path / "histories")
    yield watched
    await watched.close()


def kept_by(store: Watched, **changes: Any) -> Histories:
    settings = History(**{"timeout_ms": 5000.0, "max_retries": 2, **changes})
    return Histories(store, settings, HistoryMetrics(CollectorRegistry()))


async def found(histories: Histories, reference: HistoryReference | None, within_s: float = 20.0) -> Behaviours:
    assert reference is not None
    return await histories.find("u", "", reference, monotonic() + within_s)


async def test_what_was_read_once_is_not_read_again(store: Watched) -> None:
    histories, whole = kept_by(store), history(150)
    reference = await store.replace("u", "", whole)
    assert histories.known("u", "", reference) is None
    assert await found(histories, reference) == whole
    assert histories.known("u", "", reference) == whole
    assert await found(histories, reference) == whole
    assert store.reads == [(0, 150)]
    assert histories.known("u", "another tenant", reference) is None


async def test_only_what_is_missing_is_read_and_beginnings_are_known(store: Watched) -> None:
    histories, whole = kept_by(store), history(300, features=True)
    first = await store.append("u", "", whole.slice(0, 100))
    await found(histories, first)
    await store.append("u", "", whole.slice(100, 130))
    last = await store.append("u", "", whole.slice(130, 300))
    assert await found(histories, last) == whole
    assert store.reads == [(0, 100), (100, 300)]
    assert histories.known("u", "", first) == whole.slice(0, 100)


async def test_a_history_that_begins_otherwise_is_read_anew(store: Watched) -> None:
    histories = kept_by(store)
    await found(histories, await store.append("u", "", history(100)))
    other = await store.replace("u", "", history(80, 1))
    assert histories.known("u", "", other) is None
    assert await found(histories, other) == history(80, 1)
    # Positions are only what a sender states: where they are wrong, everything is read.
    wrong = msgspec.structs.replace(
        HistoryReference.from_behaviours(history(120, 2)),
        positions=positioned([(80, HistoryReference.from_behaviours(history(80, 1)).digest)]),
    )
    await store.replace("u", "", history(120, 2))
    assert await found(histories, wrong) == history(120, 2)
    assert store.reads == [(0, 100), (0, 80), (80, 120), (0, 120)]


async def test_what_did_not_fit_is_not_tried_a_second_time(store: Watched) -> None:
    histories = kept_by(store)
    await found(histories, await store.append("u", "", history(80, 1)))
    wrong = msgspec.structs.replace(
        HistoryReference.from_behaviours(history(120, 2)),
        positions=positioned([(80, HistoryReference.from_behaviours(history(80, 1)).digest)]),
    )
    await store.replace("u", "", history(120, 2))
    store.answers = [history(120, 2).slice(80, 120), OSError("no route")]
    assert await found(histories, wrong) == history(120, 2)
    assert store.reads == [(0, 80), (80, 120), (0, 120), (0, 120)]


@pytest.mark.parametrize(
    "answer", [history(50, 1), history(49), history(50, features=True), Behaviours(), history(51)], ids=len
)
async def test_another_history_than_the_reference_says_names_both_digests(store: Watched, answer: Behaviours) -> None:
    histories, reference = kept_by(store, max_retries=0), HistoryReference.from_behaviours(history(50))
    store.answers = [answer]
    with pytest.raises(HistoryMismatch) as refused:
        await found(histories, reference)
    assert reference.digest.hex() in str(refused.value)
    assert f"{len(answer)} behaviours of digest" in str(refused.value)
    assert histories.known("u", "", reference) is None


async def test_a_failed_read_is_tried_again_and_then_given_up(store: Watched) -> None:
    histories, reference = kept_by(store), await store.replace("u", "", history(50))
    store.answers = [OSError("no route"), HistoryUnavailable("busy")]
    assert await found(histories, reference) == history(50)
    later = await store.append("u", "", history(60).slice(50, 60))
    store.answers = [ValueError("of a user's own store")] * 3
    with pytest.raises(HistoryUnavailable, match="ValueError: of a user's own store"):
        await found(histories, later)
    assert await found(histories, later) == history(60)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "answers with NoneType, not with Behaviours"),
        (history(50).arrays(), "answers with tuple, not with Behaviours"),
        (msgspec.structs.replace(history(50), items=np.zeros(50, "<u4")), "Behaviours that are not made of bytes"),
        (Behaviours(columns=[b""]), "Behaviours that are not made of bytes"),  # type: ignore[arg-type]
    ],
    ids=["nothing", "arrays", "arrays in Behaviours", "a list of columns"],
)
async def test_an_answer_of_another_type_is_the_stores_failure(store: Watched, answer: Any, said: str) -> None:
    """It was taken for a defect of the worker, which ended, and each next owner of the lane, too."""
    histories, reference = kept_by(store, max_retries=0), HistoryReference.from_behaviours(history(50))
    store.answers = [answer]
    with pytest.raises(HistoryUnavailable, match=said):
        await found(histories, reference)


async def test_a_reference_to_a_beginning_of_what_was_read_meanwhile_is_not_read(store: Watched) -> None:
    histories = kept_by(store, max_reads=1)
    shorter = await store.append("u", "", history(150))
    longer = await store.append("u", "", history(200).slice(150, 200))
    store.gate.clear()
    waiting = [asyncio.create_task(found(histories, reference)) for reference in (longer, shorter)]
    await until(lambda: len(store.reads) == 1)
    store.gate.set()
    assert await asyncio.gather(*waiting) == [history(200), history(150)]
    assert store.reads == [(0, 200)]
    assert histories.known("u", "", longer) is not None, "the longer one is still kept"


async def test_a_slow_store_costs_a_timeout_and_a_deadline_ends_the_wait(store: Watched) -> None:
    reference = await store.replace("u", "", history(50))
    store.gate.clear()
    with pytest.raises(HistoryUnavailable, match=r"within 10 ms \(history\.timeout_ms\)"):
        await found(kept_by(store, timeout_ms=10.0, max_retries=1), reference)
    assert len(store.reads) == 2
    with pytest.raises(TimeoutError):
        await found(kept_by(store), reference, within_s=0.01)


async def test_messages_that_come_together_share_a_read(store: Watched) -> None:
    histories, reference = kept_by(store), await store.replace("u", "", history(50))
    store.gate.clear()
    waiting = [asyncio.create_task(found(histories, reference)) for _ in range(5)]
    await until(lambda: len(store.reads) == 1)
    waiting[0].cancel()  # one that waits no more does not end the others' read
    store.gate.set()
    assert await asyncio.gather(*waiting[1:]) == [history(50)] * 4
    assert len(store.reads) == 1


async def test_a_shared_read_goes_on_for_the_waiter_with_the_most_time(store: Watched) -> None:
    histories, reference = kept_by(store, max_reads=1), await store.replace("u", "", history(50))
    store.gate.clear()
    first = asyncio.create_task(histories.find("another", "", reference, monotonic() + 20))
    await until(lambda: len(store.reads) == 1)
    with pytest.raises(TimeoutError):  # it waits for its turn to read
        await found(histories, reference, within_s=0.01)
    patient = asyncio.create_task(found(histories, reference))
    await asyncio.sleep(0)
    store.answers = [history(50), history(50)]
    store.gate.set()
    assert list(await asyncio.gather(first, patient)) == [history(50)] * 2


async def test_no_more_reads_at_a_time_than_the_setting_says(store: Watched) -> None:
    histories = kept_by(store, max_reads=3)
    reference = await store.replace("u", "", history(50))
    store.gate.clear()
    waiting = [asyncio.create_task(histories.find(f"u{n}", "", reference, monotonic() + 20)) for n in range(8)]
    await until(lambda: len(store.reads) == 3)
    await asyncio.sleep(0.05)
    assert len(store.reads) == 3
    store.answers = [history(50)] * 8
    store.gate.set()
    assert await asyncio.gather(*waiting) == [history(50)] * 8


async def test_what_is_kept_is_bounded_and_the_least_recent_goes_first(store: Watched) -> None:
    each = OBJECT_BYTES + history(50).nbytes()
    histories = kept_by(store, cache_bytes=3 * each)
    references = {}
    for user in ("a", "b", "c"):
        references[user] = await store.replace(user, "", history(50))
        await histories.find(user, "", references[user], monotonic() + 20)
    assert histories.known("a", "", references["a"]) is not None
    await store.replace("d", "", history(50))
    await histories.find("d", "", references["a"], monotonic() + 20)
    assert [user for user in "abcd" if histories.known(user, "", references["a"]) is not None] == ["a", "c", "d"]
    mark = "0123456789abcdef"
    await histories.erase(Erase(id=mark, user=user_mark(mark, "c"), sent_ms=1))
    assert [user for user in "abcd" if histories.known(user, "", references["a"]) is not None] == ["a", "d"]
    nothing = kept_by(store, cache_bytes=0)
    assert await nothing.find("a", "", references["a"], monotonic() + 20) == history(50)
    assert nothing.known("a", "", references["a"]) is None


class AnyHistory(RuleBasedStateMachine):
    """Whatever a store's history went through: a reference gives the behaviours that it was made of, or an error."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.truth: dict[bytes, Behaviours] = {}
        self.references: list[HistoryReference] = []
        self.now = Behaviours()

    @initialize(cache=st.sampled_from([0, 3000, 1 << 20]))
    def begin(self, cache: int) -> None:
        self.store = Memory()
        settings = History(cache_bytes=cache, max_retries=0, timeout_ms=60_000.0)
        self.most, self.registry = cache, CollectorRegistry()
        self.histories = Histories(self.store, settings, HistoryMetrics(self.registry))

    @rule(more=st.integers(1, 90), seed=st.integers(0, 2))
    def append(self, more: int, seed: int) -> None:
        if len(self.now) + more <= 1000:
            shifted = history(len(self.now) + more, seed).slice(len(self.now), len(self.now) + more)
            self.state(joined(self.now, shifted))

    @rule(length=st.integers(1, 200), seed=st.integers(0, 2))
    def replace(self, length: int, seed: int) -> None:
        self.state(history(length, seed))

    @rule(cut=st.integers(1, 50))
    def lose_the_newest(self, cut: int) -> None:
        """As a replica that is behind, or a store that was restored."""
        self.store.behaviours = self.now = self.now.slice(0, max(0, len(self.now) - cut))

    @rule(data=st.data())
    def refer(self, data: st.DataObject) -> None:
        if not self.references:
            return
        reference = data.draw(st.sampled_from(self.references))
        begins = self.now.slice(0, reference.length)
        held = self.histories.known("u", "", reference)
        try:
            got = self.loop.run_until_complete(self.histories.find("u", "", reference, monotonic() + 60))
        except HistoryMismatch:
            assert begins != self.truth[reference.digest]
            assert held is None
        else:
            assert got == self.truth[reference.digest]
            assert held is None or held == got

    @invariant()
    def within_bounds(self) -> None:
        if hasattr(self, "histories"):
            kept = self.registry.get_sample_value("relaygr_history_cache_bytes")
            assert kept is not None
            assert 0 <= kept <= self.most

    def state(self, behaviours: Behaviours) -> None:
        positions = [each.length for each in self.references[-3:]]
        self.store.behaviours = self.now = behaviours
        reference = HistoryReference.from_behaviours(behaviours, len(self.references), positions)
        self.truth[reference.digest] = behaviours
        self.references.append(reference)

    def teardown(self) -> None:
        self.loop.close()


class Memory:
    """One user's history in this process."""

    def __init__(self) -> None:
        self.behaviours = Behaviours()

    async def reference(self, user_id: str, tenant: str = "") -> HistoryReference | None:
        return HistoryReference.from_behaviours(self.behaviours) if len(self.behaviours) else None

    async def read(self, user_id: str, tenant: str, version: int, start: int, stop: int) -> Behaviours:
        return self.behaviours.slice(start, stop)

    async def close(self) -> None:
        pass


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = hypothesis_settings(max_examples=examples(30), stateful_step_count=30, deadline=None)
