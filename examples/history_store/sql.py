"""Histories in a table with one row for each behaviour, as many feature stores and warehouses keep them.

    CREATE TABLE behaviours (user_id, position, item, action, time_ms, dwell_s, PRIMARY KEY (user_id, position))

history.store = examples.history_store.sql:make, and HISTORIES_DB names the file. SQLite stands for any database with
a Python driver: what blocks runs on a thread. The table knows no digests, so a reference reads the user's rows; the
digests of what was read last are kept, and only new rows are read.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from relaygr_stream import Behaviours, HistoryReference
from relaygr_stream.settings.schema import History

#: The column that the model reads of each behaviour, as in its schema.
DWELL: Final = "dwell_s:float32"
#: Users whose last reference is kept.
USERS: Final = 10_000
Row = tuple[Any, ...]


class SqlStore:
    """A HistoryStore over the table. Tenants are part of the user id here: TENANT/USER."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: OrderedDict[str, list[int]] = OrderedDict()  # lengths that were referred to

    async def reference(self, user_id: str, tenant: str = "") -> HistoryReference | None:
        """All rows of the user, as a reference; its positions are the lengths of earlier references."""
        user = f"{tenant}/{user_id}"
        behaviours = _behaviours(await asyncio.to_thread(self._rows, user, 0, 1 << 31))
        if not len(behaviours):
            return None
        earlier = self._seen.pop(user, [])
        self._seen[user] = [*earlier[-31:], len(behaviours)]
        if len(self._seen) > USERS:
            self._seen.popitem(last=False)
        return HistoryReference.from_behaviours(behaviours, version=len(behaviours), positions=earlier)

    async def read(self, user_id: str, tenant: str, version: int, start: int, stop: int) -> Behaviours:
        """The rows start:stop. The table only grows, so those of an older version are among them."""
        del version
        return _behaviours(await asyncio.to_thread(self._rows, f"{tenant}/{user_id}", start, stop))

    async def close(self) -> None:
        """Every call has a connection of its own: nothing is open."""

    def _rows(self, user: str, start: int, stop: int) -> Sequence[Row]:
        connection = sqlite3.connect(self._path, timeout=1.0)
        try:
            return connection.execute(
                "SELECT item, action, time_ms, dwell_s FROM behaviours"
                " WHERE user_id = ? AND position >= ? AND position < ? ORDER BY position",
                (user, start, stop),
            ).fetchall()
        finally:
            connection.close()


def _behaviours(rows: Sequence[Row]) -> Behaviours:
    items, actions, times, dwell = zip(*rows, strict=True) if rows else ((), (), (), ())
    plain = Behaviours.from_arrays(np.array(items, np.int64), np.array(actions, np.int64), np.array(times, np.int64))
    columns = {DWELL: np.array(dwell, "<f4").tobytes()} if rows else {}
    return Behaviours(plain.items, plain.actions, plain.times, columns)


def make(settings: History) -> SqlStore:
    """The factory that history.store names. settings: its timeouts are kept by the relay."""
    del settings
    return SqlStore(os.environ["HISTORIES_DB"])
