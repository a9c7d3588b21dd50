"""A history as stores keep it: one packed string for each group of columns, and a head that says what they hold.

    group       a row of it
    behaviours  item (uint32), action (uint8), time (int64): 13 bytes, little-endian
    features    the feature columns by key, as in messages, then the column UPPER of a history that has an item id
                beyond uint32: the upper halves of all its ids; no group without columns

Rows are packed, so a range of behaviours is one range of bytes. The head holds what the digest of the next append
depends on: the history is not read for it, but for its last rows. `PackedStore` is a store that keeps histories so.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from relaygr_stream.errors import HistoryMismatch, HistoryUnavailable, InputError
from relaygr_stream.wire.behaviours import ACTION_DTYPE, ITEM_DTYPE, TIME_DTYPE, WIDE_ITEM_DTYPE, Behaviours, pack_ids
from relaygr_stream.wire.history import BLOCK, MAX_POSITIONS, HistoryReference, digests, positioned, row_bytes
from relaygr_stream.wire.messages import tenant_key

#: No feature's key has a blank. Earlier releases take it for a column that they do not know, and refuse the history.
UPPER: Final = "upper half:uint32"
PLAIN: Final = np.dtype([("items", ITEM_DTYPE), ("actions", ACTION_DTYPE), ("times", TIME_DTYPE)])
#: A history that is longer than its limit is cut to this share of it: it is cut, and inferred anew, once in a while.
KEPT_SHARE: Final = 0.75
#: A write whose head has changed meanwhile is made anew so often. Of writers that meet, one succeeds each time.
CONFLICTS: Final = 100
#: Before the next try, a random part of the first, doubled with each conflict up to the longest: ten seconds in all, on
#: average. At the longest, a hundred writers whose writes take a millisecond each seldom meet.
FIRST_WAIT_S: Final = 0.002
LONGEST_WAIT_S: Final = 0.2


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a store keeps beside the rows of a history with at least one behaviour.

    block: the digest at the last multiple of BLOCK. positions: the newest earlier lengths with their digests. columns:
    bytes of a row, by key.
    """

    version: int
    length: int
    digest: bytes
    block: bytes
    columns: dict[str, int] = {}
    positions: tuple[tuple[int, bytes], ...] = ()

    @property
    def reference(self) -> HistoryReference:
        """The reference of all of it."""
        return HistoryReference(
            length=self.length, digest=self.digest, version=self.version, positions=positioned(self.positions)
        )

    @property
    def tail(self) -> int:
        """Where the last, incomplete block begins: an append needs the rows from there on."""
        return self.length - self.length % BLOCK

    @property
    def features(self) -> dict[str, int]:
        """Of them, the feature columns."""
        return {key: size for key, size in self.columns.items() if key != UPPER}

    @property
    def widths(self) -> tuple[int, ...]:
        """Bytes of a row, by group."""
        return widths(self.columns)


class Write(msgspec.Struct, frozen=True):
    """A write that is to take effect if the head is still `before`. rows: by group, behind those there if `appends`."""

    before: Head | None
    after: Head
    rows: tuple[bytes, ...]
    appends: bool

    @property
    def appends_to(self) -> tuple[int, ...]:
        """Bytes that each group must have by now; empty: any."""
        if self.before is None or not self.appends:
            return ()
        return tuple(self.before.length * width for width in self.before.widths)


_heads = msgspec.msgpack.Decoder(Head)
encode_head: Final = msgspec.msgpack.Encoder().encode


def decode_head(data: bytes) -> Head:
    """Decode a head. Raises HistoryUnavailable if the bytes are not a head."""
    try:
        return _heads.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise HistoryUnavailable(f"the store holds what is no history: {str(error)[:200]}") from error


def widths(columns: Mapping[str, int]) -> tuple[int, ...]:
    """Bytes of a row of each group."""
    return (PLAIN.itemsize, sum(columns.values())) if columns else (PLAIN.itemsize,)


def columns_of(behaviours: Behaviours, *, wide: bool = False) -> dict[str, int]:
    """Bytes of a row of each column in the group of features, by key. wide: with UPPER in any case."""
    upper = {UPPER: ITEM_DTYPE.itemsize} if wide or behaviours.wide else {}
    return row_bytes(behaviours) | upper


def pack(behaviours: Behaviours, *, wide: bool = False) -> tuple[bytes, ...]:
    """The rows of each group. wide: as of columns_of."""
    items, actions, times = behaviours.arrays()
    rows = np.empty(len(items), PLAIN)
    rows["items"], rows["actions"], rows["times"] = items & np.iinfo(ITEM_DTYPE).max, actions, times
    columns = columns_of(behaviours, wide=wide)
    if not columns:
        return (rows.tobytes(),)
    table = behaviours.table
    if UPPER in columns:
        table = {**table, UPPER: (items.astype(WIDE_ITEM_DTYPE) >> 32).astype(ITEM_DTYPE).tobytes()}
    parts = [np.frombuffer(table[key], np.uint8).reshape(len(items), size) for key, size in columns.items()]
    return rows.tobytes(), np.concatenate(parts, axis=1).tobytes()


def unpack(groups: Sequence[bytes], columns: Mapping[str, int]) -> Behaviours:
    """The behaviours whose rows these are; of groups of unequal length the common rows."""
    count = min(len(rows) // size for rows, size in zip(groups, widths(columns), strict=True))
    rows = np.frombuffer(groups[0], PLAIN, count)
    table = {}
    if columns:
        width = sum(columns.values())
        features = np.frombuffer(groups[1], np.uint8, count * width).reshape(count, width)
        at = 0
        for key, size in columns.items():
            table[key] = features[:, at : at + size].tobytes()
            at += size
    items = rows["items"].tobytes()
    if upper := table.pop(UPPER, b""):
        items = pack_ids(rows["items"] + (np.frombuffer(upper, ITEM_DTYPE).astype(WIDE_ITEM_DTYPE) << 32), "items")
    return Behaviours(items, rows["actions"].tobytes(), rows["times"].tobytes(), table or msgspec.UNSET)


def joined(first: Behaviours, second: Behaviours) -> Behaviours:
    """Both, one behind the other; their columns are the same, unless one is empty."""
    if not len(first) or not len(second):
        return second if len(second) else first
    table = {key: data + second.table[key] for key, data in first.table.items()}
    items = bytes(first.items) + second.items
    narrow = len(second.items) == ITEM_DTYPE.itemsize * len(second)
    if (first.wide and narrow) or second.wide:  # otherwise they are alike, or what checks them says what is wrong
        items = np.concatenate([first.arrays()[0], second.arrays()[0]], dtype=WIDE_ITEM_DTYPE).tobytes()
    return Behaviours(
        items,
        bytes(first.actions) + second.actions,
        bytes(first.times) + second.times,
        table or msgspec.UNSET,
    )


def replacing(before: Head | None, behaviours: Behaviours) -> Write:
    """The write that makes these behaviours the history. Raises InputError for none, or times that go back."""
    behaviours.checked(InputError)
    count = len(behaviours)
    if not count:
        raise InputError("a history needs at least one behaviour; `relaygr history erase` removes a user's")
    found = digests(behaviours, [count - count % BLOCK, count])
    head = Head(
        version=1 if before is None else before.version + 1,
        length=count,
        digest=found[count],
        block=found[count - count % BLOCK],
        columns=columns_of(behaviours),
    )
    return Write(before, head, pack(behaviours), appends=False)


def needed(before: Head | None, behaviours: Behaviours, most: int) -> tuple[int, int]:
    """Start and stop of the rows that an append of behaviours needs to know: the last one in any case."""
    if before is None:
        return 0, 0
    whole = _too_long(before, len(behaviours), most) or _widens(before, behaviours)
    return (0 if whole else min(before.tail, before.length - 1)), before.length


def appending(before: Head | None, rows: Behaviours, behaviours: Behaviours, most: int = 0) -> Write:
    """The write that appends behaviours, and cuts what is longer than `most` (0: nothing) to KEPT_SHARE of it.

    rows: those that are `needed`. Raises as `WritableStore.append`.
    """
    if before is None:
        return replacing(
            before, behaviours.slice(max(0, len(behaviours) - most), len(behaviours)) if most else behaviours
        )
    behaviours.checked(InputError)
    if not len(behaviours):
        raise InputError("there are no behaviours to append")
    if row_bytes(behaviours) != before.features:
        raise InputError(
            f"the history has the columns {sorted(before.features)}, the behaviours to append "
            f"{sorted(behaviours.table)}"
        )
    _check_end(before, rows, needed(before, behaviours, most)[0])
    both = joined(rows, behaviours).checked(InputError)
    if _too_long(before, len(behaviours), most):
        return replacing(before, both.slice(max(0, len(both) - max(1, int(KEPT_SHARE * most))), len(both)))
    length = before.length + len(behaviours)
    boundary = length - length % BLOCK
    behind = both.slice(max(0, before.tail - (before.length - len(rows))), len(both))
    found = digests(behind, [boundary, length], before.tail, before.block)
    head = Head(
        version=before.version + 1,
        length=length,
        digest=found[length],
        block=found[boundary],
        columns=columns_of(behaviours, wide=UPPER in before.columns),
        positions=(*before.positions, (before.length, before.digest))[-MAX_POSITIONS:],
    )
    if _widens(before, behaviours):
        return Write(before, head, pack(both), appends=False)
    return Write(before, head, pack(behaviours, wide=UPPER in before.columns), appends=True)


def _check_end(before: Head, rows: Behaviours, start: int) -> None:
    """Raises HistoryMismatch unless `rows` are the history from `start` to its end, as far as the head tells: without
    them, the digest of what is appended would be that of another history."""
    if start + len(rows) != before.length or row_bytes(rows) != before.features:
        raise lost_rows()
    state, begin = (b"", 0) if start == 0 else (before.block, before.tail)
    if begin >= start and digests(rows.slice(begin - start, len(rows)), [before.length], begin, state) != {
        before.length: before.digest
    }:
        raise lost_rows()


def lost_rows() -> HistoryMismatch:
    """The error of a write that would build on rows that are not those of the head."""
    return HistoryMismatch(
        "the store has not all rows of this history any more, or others: nothing was appended; write the whole history "
        "anew (`relaygr history import`), or erase it, and see that the store evicts no keys"
    )


def _narrowed(behaviours: Behaviours) -> Behaviours:
    """The same, wide only if an item id needs it. Raises InputError as `Behaviours.checked`."""
    return behaviours.checked(InputError).slice(0, len(behaviours))


def _widens(before: Head, behaviours: Behaviours) -> bool:
    """Whether these are the history's first behaviours with a wide item id: then all its rows are written anew."""
    return behaviours.wide and UPPER not in before.columns


def _too_long(before: Head, count: int, most: int) -> bool:
    return bool(most) and before.length + count > most


class PackedStore(ABC):
    """A HistoryStore and WritableStore over three operations on one user's packed history.

    A write takes effect only where nothing was written since its head was read; otherwise it is made anew, after a
    random time that grows. user: the tenant and the user in one key (tenant_key).
    """

    async def reference(self, user_id: str, tenant: str = "") -> HistoryReference | None:
        """As HistoryStore.reference."""
        head = await self._head(tenant_key(tenant, user_id))
        return None if head is None else head.reference

    async def read(self, user_id: str, tenant: str, version: int, start: int, stop: int) -> Behaviours:  # noqa: ARG002
        """As HistoryStore.read."""
        start, stop = max(0, start), max(0, stop)  # below 0, stores count from the end
        return (await self._rows(tenant_key(tenant, user_id), start, stop))[1] if start < stop else Behaviours()

    async def append(self, user_id: str, tenant: str, behaviours: Behaviours, most: int = 0) -> HistoryReference:
        """As WritableStore.append."""
        user, behaviours = tenant_key(tenant, user_id), _narrowed(behaviours)

        async def make(head: Head | None) -> Write | None:
            start, stop = needed(head, behaviours, most)
            again, rows = await self._rows(user, start, stop) if stop > start else (head, Behaviours())
            return appending(head, rows, behaviours, most) if again == head else None

        return await self._until_written(user, make)

    async def replace(self, user_id: str, tenant: str, behaviours: Behaviours) -> HistoryReference:
        """As WritableStore.replace."""

        async def make(head: Head | None) -> Write:
            return replacing(head, _narrowed(behaviours))

        return await self._until_written(tenant_key(tenant, user_id), make)

    async def _until_written(
        self, user: str, make: Callable[[Head | None], Awaitable[Write | None]]
    ) -> HistoryReference:
        """Carry out the write that `make` makes of the head (None: the head has changed meanwhile), anew after each
        conflict. Raises HistoryUnavailable when others came first each time."""
        longest_s = FIRST_WAIT_S
        for _ in range(CONFLICTS):
            write = await make(await self._head(user))
            if write is not None and await self._written(user, write):
                return write.after.reference
            await asyncio.sleep(random.uniform(0.0, longest_s))
            longest_s = min(2 * longest_s, LONGEST_WAIT_S)
        raise HistoryUnavailable(f"others wrote this history at the same time, {CONFLICTS} times in a row")

    async def _written(self, user: str, write: Write) -> bool:
        """`_write`. Where its answer is lost, the head tells whether it was done, unless another write followed: an
        append that is repeated adds twice."""
        try:
            return await self._write(user, write)
        except HistoryUnavailable:
            if await self._head(user) != write.after:
                raise
            return True

    @abstractmethod
    async def _head(self, user: str) -> Head | None:
        """The user's head; None: no history. Raises HistoryUnavailable, as the other two."""

    @abstractmethod
    async def _rows(self, user: str, start: int, stop: int) -> tuple[Head | None, Behaviours]:
        """The head and the behaviours start:stop, of one moment."""

    @abstractmethod
    async def _write(self, user: str, write: Write) -> bool:
        """Carry out the whole write, unless the head is not `write.before`; returns whether it was. Raises `lost_rows`
        where the groups have not the bytes that it `appends_to`."""
