"""What every history store does: in SQLite, in a real Redis, and in a user's own."""

from __future__ import annotations

import asyncio
import math
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from redis import Redis

from relaygr_stream.errors import ConfigError, HistoryMismatch, HistoryUnavailable, InputError
from relaygr_stream.history.packed import CONFLICTS, FIRST_WAIT_S, KEPT_SHARE, LONGEST_WAIT_S, Write
from relaygr_stream.history.sqlite_store import SqliteStore, prepared
from relaygr_stream.history.store import WritableStore, open_store
from relaygr_stream.settings.schema import History
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.history import MAX_POSITIONS, HistoryReference
from tests.unit.history import own_store
from tests.unit.history.behaviours import history
from tests.unit.history.servers import RedisServer


@pytest.fixture(params=["sqlite", "redis", "own"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> History:
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        return server.settings()
    if request.param == "own":
        return History(store=f"{own_store.__name__}:make", prefix=str(tmp_path))
    return History(store=f"sqlite:{tmp_path / 'histories'}", timeout_ms=20_000.0)


@pytest.fixture
async def store(settings: History) -> AsyncIterator[WritableStore]:
    async with opened(settings) as store:
        yield store


@asynccontextmanager
async def opened(settings: History) -> AsyncIterator[WritableStore]:
    """One more store of the same histories, as another process has it."""
    store = cast(WritableStore, open_store(settings))
    try:
        yield store
    finally:
        await store.close()


def tamper(settings: History, group: str, change: Callable[[bytes], bytes]) -> None:
    """Change the rows of user u behind the store's back, as an eviction, a partial restore or another program does."""
    if settings.store.startswith("redis://"):
        with Redis.from_url(settings.store) as redis:
            key = f"{settings.prefix}{{u}}:{group}"
            rows = change(cast(bytes, redis.get(key)))
            redis.set(key, rows) if rows else redis.delete(key)
    elif settings.store.startswith("sqlite:"):
        with closing(sqlite3.connect(settings.store.removeprefix("sqlite:"))) as db, db:
            ((rows,),) = db.execute(f"SELECT {group} FROM histories")
            db.execute(f"UPDATE histories SET {group} = ?", (change(rows),))
    else:
        groups = own_store.KEPT[settings.prefix].groups["u"]
        at = ("behaviours", "features").index(group)
        groups[at] = change(groups[at])


@pytest.mark.parametrize("length", [50, 64])
@pytest.mark.parametrize(
    ("group", "change", "most"),
    [
        ("behaviours", lambda rows: b"", 0),
        ("features", lambda rows: b"", 0),
        ("behaviours", lambda rows: rows[: 13 * 20], 0),
        ("behaviours", lambda rows: rows[: 13 * 20] + rows[13 * 21 :], 0),
        ("features", lambda rows: rows[:-20], 0),
        ("behaviours", lambda rows: rows + rows[-13:], 0),
        ("features", lambda rows: rows + rows[-20:], 0),
        ("behaviours", lambda rows: b"", 50),
        ("features", lambda rows: rows[20:], 50),
        ("behaviours", lambda rows: b"\xff" + rows[1:], 50),
    ],
    ids=[
        *("rows gone", "features gone", "a part", "one missing", "a row of features missing", "more", "more features"),
        *("rows gone, cut", "a row of features missing, cut", "another first row, cut"),
    ],
)
async def test_an_append_onto_lost_rows_is_an_error_and_later_ones_are_too(
    settings: History, store: WritableStore, group: str, change: Callable[[bytes], bytes], length: int, most: int
) -> None:
    """A digest made from the head alone would say that what is left is the history."""
    whole = history(length + 60, features=True)
    before = await store.append("u", "", whole.slice(0, length))
    await asyncio.to_thread(tamper, settings, group, change)
    for start in (length, length, length + 50):
        with pytest.raises(HistoryMismatch, match="erase"):
            await store.append("u", "", whole.slice(start, length + 60), most)
    assert await store.reference("u") == before
    assert await store.replace("u", "", whole) == HistoryReference.from_behaviours(whole, 2)
    assert await store.read("u", "", 2, 0, 999) == whole


async def test_an_append_onto_other_rows_at_the_end_is_an_error(settings: History, store: WritableStore) -> None:
    await store.append("u", "", history(100))
    await asyncio.to_thread(tamper, settings, "behaviours", lambda rows: rows[:-13] + b"\xff" + rows[-12:])
    with pytest.raises(HistoryMismatch, match="erase"):
        await store.append("u", "", history(110).slice(100, 110))


@pytest.mark.parametrize("features", [False, True], ids=["plain", "features"])
async def test_a_range_without_rows_is_empty(store: WritableStore, features: bool) -> None:
    await store.append("u", "", history(10, features=features))
    for start, stop in ((0, 0), (3, 3), (5, 0), (2, 1), (10, 10), (10, 12), (-4, 0), (-4, -1), (3, -1)):
        assert len(await store.read("u", "", 1, start, stop)) == 0, (start, stop)
    assert await store.read("u", "", 1, -4, 3) == history(3, features=features)


async def test_many_writers_of_one_user_all_succeed(settings: History) -> None:
    """Each has a store of its own, as processes have: nothing but the store keeps them apart."""
    one = Behaviours.from_arrays([1], [1], [1])
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(opened(settings)) for _ in range(16)]

        async def write(store: WritableStore) -> None:
            for _ in range(5):
                await store.append("u", "", one)

        await asyncio.gather(*map(write, stores))
        found = await stores[0].reference("u")
        assert found is not None
        assert (found.length, found.version) == (80, 80)
        rows = await stores[0].read("u", "", 80, 0, 80)
        assert HistoryReference.from_behaviours(rows).digest == found.digest


def test_a_file_that_others_open_at_the_same_time_is_tried_again(tmp_path: Path) -> None:
    """Where waiting would be a deadlock, SQLite refuses at once, as here, where it may not wait."""
    path = tmp_path / "histories"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    assert prepared(path, 0.0, math.inf) is None
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        prepared(path, 0.0, -math.inf)
    other.execute("COMMIT")
    db = prepared(path, 0.0, -math.inf)
    assert db is not None
    db.close()
    other.close()


async def test_writers_that_meet_wait_longer_each_time_and_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Beaten(own_store.OwnStore):
        async def _write(self, user: str, write: Write) -> bool:
            return False

    waits: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr("relaygr_stream.history.packed.asyncio.sleep", noted)
    for write in ("append", "replace"):
        waits.clear()
        with pytest.raises(HistoryUnavailable, match="at the same time"):
            await getattr(Beaten(own_store.Kept()), write)("u", "", history(1))
        slept = [wait for wait in waits if wait]
        assert len(slept) == CONFLICTS
        assert all(wait <= FIRST_WAIT_S * 2**number for number, wait in enumerate(slept[:5]))
        assert LONGEST_WAIT_S / 2 < max(slept) <= LONGEST_WAIT_S
        assert len(set(slept)) == CONFLICTS, "by chance: writers that met do not meet again"


async def test_an_append_whose_answer_is_lost_is_not_made_twice(tmp_path: Path) -> None:
    """A caller that asks again after an error would append the same behaviours a second time."""

    class Lossy(SqliteStore):
        lost = True

        async def _write(self, user: str, write: Write) -> bool:
            done = await super()._write(user, write)
            if self.lost:
                raise HistoryUnavailable("its answer is lost")
            return done

    class Away(SqliteStore):
        async def _write(self, user: str, write: Write) -> bool:
            raise HistoryUnavailable("it never came there")

    store = Lossy(tmp_path / "histories")
    assert await store.append("u", "", history(1)) == HistoryReference.from_behaviours(history(1), 1)
    assert await store.replace("v", "", history(2)) == HistoryReference.from_behaviours(history(2), 1)
    assert len(await store.read("u", "", 1, 0, 9)) == 1
    await store.close()
    away = Away(tmp_path / "histories")
    with pytest.raises(HistoryUnavailable, match="never came"):
        await away.append("u", "", history(2).slice(1, 2))
    await away.close()


@pytest.mark.parametrize("features", [False, True], ids=["plain", "features"])
async def test_a_history_grows_and_is_read_in_parts(store: WritableStore, features: bool) -> None:
    whole = history(200, features=features)
    assert await store.reference("u") is None
    assert len(await store.read("u", "", 0, 0, 10)) == 0
    for start, stop in ((0, 1), (1, 70), (70, 128), (128, 200)):
        after = await store.append("u", "", whole.slice(start, stop))
    assert after == await store.reference("u") == HistoryReference.from_behaviours(whole, 4, [1, 70, 128])
    for start, stop in ((0, 200), (0, 1), (63, 130), (199, 200)):
        assert await store.read("u", "", 4, start, stop) == whole.slice(start, stop)
    assert await store.read("u", "", 4, 150, 999) == whole.slice(150, 200)
    assert len(await store.read("u", "", 4, 200, 300)) == 0


async def test_tenants_and_strange_ids_are_apart(store: WritableStore) -> None:
    users = [("u", ""), ("u", "t"), ("t\0u", ""), ("}", ""), ("用户", "{"), ("a b:c%20", ""), ("a b:c ", "")]
    for number, (user, tenant) in enumerate(users):
        await store.replace(user, tenant, history(5 + number, number))
    for number, (user, tenant) in enumerate(users):
        if (user, tenant) != ("u", "t"):  # one key with the next, as everywhere: a NUL is of no id that a tenant has
            assert await store.read(user, tenant, 1, 0, 99) == history(5 + number, number)


async def test_a_replaced_history_has_a_new_version_and_no_positions(store: WritableStore) -> None:
    await store.append("u", "", history(50))
    await store.append("u", "", history(60).slice(50, 60))
    assert await store.replace("u", "", history(20, 1, features=True)) == HistoryReference.from_behaviours(
        history(20, 1, features=True), 3
    )
    assert await store.read("u", "", 3, 0, 99) == history(20, 1, features=True)
    await store.replace("u", "", history(9, 2))
    assert await store.read("u", "", 4, 0, 99) == history(9, 2)


async def test_a_history_beyond_its_limit_keeps_its_newest(store: WritableStore) -> None:
    whole = history(201)
    await store.append("u", "", whole.slice(0, 100), 200)
    assert (await store.append("u", "", whole.slice(100, 200), 200)).length == 200
    kept = int(KEPT_SHARE * 200)
    assert await store.append("u", "", whole.slice(200, 201), 200) == HistoryReference.from_behaviours(
        whole.slice(201 - kept, 201), 3
    )
    assert await store.read("u", "", 3, 0, 999) == whole.slice(201 - kept, 201)
    assert (await store.append("new", "", whole, 200)).length == 200


async def test_positions_are_the_newest(store: WritableStore) -> None:
    whole = history(50)
    for at in range(50):
        after = await store.append("u", "", whole.slice(at, at + 1))
    assert sorted(after.stated()) == list(range(50 - MAX_POSITIONS, 51))


@pytest.mark.parametrize("length", [1, 50, 63, 64, 65, 128])
async def test_what_does_not_continue_a_history_is_refused_and_changes_nothing(
    store: WritableStore, length: int
) -> None:
    before = await store.append("u", "", history(length + 3).slice(3, length + 3))
    for bad in (history(3), history(60, features=True).slice(50, 60), Behaviours()):
        with pytest.raises(InputError):
            await store.append("u", "", bad)
    with pytest.raises(InputError, match="erase"):
        await store.replace("u", "", Behaviours())
    assert await store.reference("u") == before
    after = await store.append("u", "", history(length + 7).slice(length + 3, length + 7))
    whole = history(length + 7).slice(3, length + 7)
    assert (after.length, after.digest) == (length + 4, HistoryReference.from_behaviours(whole, 1).digest)


async def test_an_erased_user_is_gone_and_may_begin_anew(store: WritableStore) -> None:
    await store.append("u", "", history(50, features=True))
    await store.append("v", "", history(50))
    assert await store.erase("u")
    assert not await store.erase("u")
    assert await store.reference("u") is None
    assert len(await store.read("u", "", 1, 0, 50)) == 0
    assert (await store.append("u", "", history(4))).length == 4
    assert (await store.reference("v")) is not None


async def test_writers_at_once_lose_nothing_and_readers_see_whole_writes(store: WritableStore) -> None:
    """Every reference that a reader gets is one of a state that was, and the rows behind it fit."""
    same = Behaviours.from_arrays([1], [1], [1])

    async def read() -> None:
        for _ in range(30):
            reference = await store.reference("u")
            if reference is not None:
                rows = await store.read("u", "", reference.version, 0, reference.length)
                assert HistoryReference.from_behaviours(rows).digest == reference.digest

    await asyncio.gather(*(store.append("u", "", same) for _ in range(12)), read(), read())
    found = await store.reference("u")
    assert found is not None
    assert (found.length, found.version) == (12, 12)


def unusable(settings: History) -> object:
    return settings


@pytest.mark.parametrize(
    "name", ["", "nothing", "no_module:x", "json:nothing", f"{__name__}:unusable", "redis://h:x/0"]
)
def test_a_store_that_is_none_is_a_configuration_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"history\.store"):
        open_store(History(store=name))


async def test_every_store_has_the_protocol(store: object) -> None:
    assert isinstance(store, WritableStore)


async def test_an_erased_users_rows_are_on_the_disk_no_more(tmp_path: Path) -> None:
    """While another process had the file open, its journal and its pages kept them."""
    file, secret = tmp_path / "histories", 0x5EC2E7
    store, reader = SqliteStore(file), SqliteStore(file)
    await store.replace("v", "", history(3))
    await store.replace("u", "", Behaviours.from_arrays([secret] * 50, [1] * 50, list(range(50))))
    assert (await reader.reference("u")) is not None
    mark = np.uint32(secret).tobytes() + b"\x01"  # an item and its action

    def on_disk() -> bool:
        return any(mark in path.read_bytes() for path in tmp_path.iterdir())

    assert on_disk()
    assert await store.erase("u")
    assert not on_disk()
    assert (await reader.reference("v")) is not None
    for each in (store, reader):
        await each.close()
