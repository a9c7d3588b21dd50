"""Histories in a SQLite file: for a demo, for tests, and for one machine. Each call runs on a thread of its own.

Several processes may read and write it. SQLite's journal makes a write all or nothing; writers wait for each other.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from relaygr_stream.errors import ConfigError, HistoryUnavailable
from relaygr_stream.history.packed import (
    LONGEST_WAIT_S,
    Head,
    PackedStore,
    Write,
    decode_head,
    encode_head,
    lost_rows,
    unpack,
    widths,
)
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.messages import tenant_key

T = TypeVar("T")

#: SQLite opens a file for one thread at a time; reads take tens of microseconds.
THREADS: Final = 1
_CREATE: Final = (
    "CREATE TABLE IF NOT EXISTS histories"
    " (user BLOB PRIMARY KEY, head BLOB NOT NULL, behaviours BLOB NOT NULL, features BLOB NOT NULL)"
)


class SqliteStore(PackedStore):
    """A PackedStore in the file `path`. timeout_s: how long a call waits for another writer."""

    def __init__(self, path: str | Path, timeout_s: float = 1.0) -> None:
        if not str(path):
            raise ConfigError("history.store = sqlite: names no file; write sqlite:FILE")
        self._path = Path(path)
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(THREADS, "history")
        self._open: sqlite3.Connection | None = None

    async def erase(self, user_id: str, tenant: str = "") -> bool:
        """As WritableStore.erase. The freed pages are overwritten (secure_delete), and the journal is emptied; while
        other processes read the file for longer than a call waits, it is not, and this raises after the deletion.
        """
        key = tenant_key(tenant, user_id).encode()

        if self._absent():
            return False

        def work(db: sqlite3.Connection) -> bool:
            return db.execute("DELETE FROM histories WHERE user = ?", (key,)).rowcount > 0

        erased = await self._run(work, "BEGIN IMMEDIATE")
        if not await self._run(_emptied, ""):
            raise HistoryUnavailable(
                f"{self._path}: the user has no history any more, but the journal is in use and may have its rows"
            )
        return erased

    async def close(self) -> None:
        """Close the file."""
        if self._open is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._open.close)
            self._open = None
        self._thread.shutdown(wait=False)

    async def _head(self, user: str) -> Head | None:
        return None if self._absent() else await self._run(lambda db: _head(db, user.encode()))

    async def _rows(self, user: str, start: int, stop: int) -> tuple[Head | None, Behaviours]:
        return await self._run(lambda db: _rows(db, user.encode(), start, stop))

    async def _write(self, user: str, write: Write) -> bool:
        key, rows = user.encode(), (*write.rows, b"")[:2]

        def work(db: sqlite3.Connection) -> bool:
            if _head(db, key) != write.before:
                return False
            if write.appends:  # CAST: || makes text of blobs
                sizes = "SELECT length(behaviours), length(features) FROM histories WHERE user = ?"
                if db.execute(sizes, (key,)).fetchone() != (*write.appends_to, 0)[:2]:
                    raise lost_rows()
                db.execute(
                    "UPDATE histories SET head = ?, behaviours = CAST(behaviours || ? AS BLOB),"
                    " features = CAST(features || ? AS BLOB) WHERE user = ?",
                    (encode_head(write.after), *rows, key),
                )
            else:
                db.execute("REPLACE INTO histories VALUES (?, ?, ?, ?)", (key, encode_head(write.after), *rows))
            return True

        return await self._run(work, "BEGIN IMMEDIATE")

    async def _run(self, work: Callable[[sqlite3.Connection], T], begin: str = "BEGIN") -> T:
        """What `work` returns, in a transaction of its own on the thread; begin = "": in none."""

        def on_thread() -> T:
            try:
                with self._connection() as db:
                    if begin:
                        db.execute(begin)
                    return work(db)
            except sqlite3.Error as error:
                raise HistoryUnavailable(f"{self._path}: {error}") from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, on_thread)

    def _absent(self) -> bool:
        """Whether the file is not there yet, though it could be: what only reads makes none."""
        return self._open is None and not self._path.exists() and self._path.parent.is_dir()

    def _connection(self) -> sqlite3.Connection:
        if self._open is None:
            _make_private(self._path)
            deadline = time.monotonic() + self._timeout_s
            while (db := prepared(self._path, self._timeout_s, deadline)) is None:
                time.sleep(random.uniform(0.0, LONGEST_WAIT_S))
            self._open = db
        return self._open


def prepared(path: Path, timeout_s: float, deadline: float) -> sqlite3.Connection | None:
    """The file, open. None, before the deadline: others open a new file at the same time, and SQLite refuses at once,
    whatever its timeout, where waiting for them would be a deadlock."""
    db = sqlite3.connect(path, timeout=timeout_s, isolation_level=None, check_same_thread=False)
    try:
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON"):
            db.execute(f"PRAGMA {pragma}")
        db.execute(_CREATE)
    except sqlite3.Error as error:
        db.close()
        busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY  # the low byte: BUSY_RECOVERY is one
        if busy and time.monotonic() < deadline:
            return None
        raise
    return db


def _make_private(path: Path) -> None:
    """Make an absent file the user's alone, whose mode SQLite gives its journals; else it makes what all may read."""
    with suppress(OSError):  # SQLite says what is wrong
        if not path.exists():
            path.touch(mode=0o600)


def _emptied(db: sqlite3.Connection) -> bool:
    """Move the journal into the file and empty it; False: somebody reads it."""
    (busy, *_), *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return not busy


def _head(db: sqlite3.Connection, key: bytes) -> Head | None:
    found = db.execute("SELECT head FROM histories WHERE user = ?", (key,)).fetchone()
    return None if found is None else decode_head(found[0])


def _rows(db: sqlite3.Connection, key: bytes, start: int, stop: int) -> tuple[Head | None, Behaviours]:
    head = _head(db, key)
    if head is None:
        return None, Behaviours()
    sizes = (*widths(head.columns), 0)[:2]
    found = db.execute(
        "SELECT substr(behaviours, ?, ?), substr(features, ?, ?) FROM histories WHERE user = ?",
        (*(part for size in sizes for part in (start * size + 1, max(0, stop - start) * size)), key),
    ).fetchone()
    return head, unpack([part or b"" for part in found[: len(head.widths)]], head.columns)  # substr('') is NULL
