"""A store as a user may write one: over the three operations of PackedStore, and named by its factory."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from relaygr_stream.history.packed import Head, PackedStore, Write, lost_rows, unpack, widths
from relaygr_stream.settings.schema import History
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.messages import tenant_key


class Kept:
    """What the stores of one prefix share: a user's head and groups."""

    def __init__(self) -> None:
        self.heads: dict[str, Head] = {}
        self.groups: dict[str, list[bytes]] = {}


KEPT: defaultdict[str, Kept] = defaultdict(Kept)


class OwnStore(PackedStore):
    """In memory. Each call yields to others first, as over a network."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    async def erase(self, user_id: str, tenant: str = "") -> bool:
        await asyncio.sleep(0)
        self._kept.groups.pop(tenant_key(tenant, user_id), None)
        return self._kept.heads.pop(tenant_key(tenant, user_id), None) is not None

    async def close(self) -> None:
        pass

    async def _head(self, user: str) -> Head | None:
        await asyncio.sleep(0)
        return self._kept.heads.get(user)

    async def _rows(self, user: str, start: int, stop: int) -> tuple[Head | None, Behaviours]:
        await asyncio.sleep(0)
        head = self._kept.heads.get(user)
        if head is None:
            return None, Behaviours()
        sizes = widths(head.columns)
        parts = zip(self._kept.groups[user], sizes, strict=False)
        return head, unpack([rows[start * size : stop * size] for rows, size in parts], head.columns)

    async def _write(self, user: str, write: Write) -> bool:
        await asyncio.sleep(0)
        if self._kept.heads.get(user) != write.before:
            return False
        if write.appends:
            groups = self._kept.groups[user]
            if tuple(map(len, groups)) != write.appends_to:
                raise lost_rows()
            self._kept.groups[user] = [rows + more for rows, more in zip(groups, write.rows, strict=True)]
        else:
            self._kept.groups[user] = list(write.rows)
        self._kept.heads[user] = write.after
        return True


def make(settings: History) -> OwnStore:
    return OwnStore(KEPT[settings.prefix])
