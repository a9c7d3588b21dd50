"""A DRAM tier's memory as a mapped file, with a slot for each copy, so that a restarted process finds its copies again.

    header page | slots of SLOT_BYTES | data: the tier's arena

A copy's slot follows from its place: copies take at least `unit` bytes, so no two begin in one unit of the data. Each
prefix of the writes is safe: a slot is BUSY before the bytes of its extent are written, and VALID, with a checksum and
the bytes' digest, after them. A process that is killed loses no write: the pages are the kernel's. After the host's
crash, checksums and digests tell what is whole.

The file holds no other bytes than this module wrote: of any other, nothing is taken. tier_file_open.py opens it.

Where someone shortens it, the worker ends: an access behind its end is a bus error, and what was read of it lately may
be zeros, which a file made whole again would serve. `check` looks before the accesses, so that the end has its reason.
Header and slots are read and written by system calls, which say what a disk does not give; for the data they would cost
a copy, and `fetch` asks before.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from relaygr_stream.cache.arena import Extent
from relaygr_stream.cache.host import is_memory
from relaygr_stream.cache.mapped import why_absent, why_lost
from relaygr_stream.errors import CapacityError, DeviceError

#: Extents begin at pages of this size (memory.ALIGNMENT); those of a processor may be larger.
PAGE: Final = 4096
MAGIC: Final = b"RGRTIER1"
SLOT_BYTES: Final = 512
CHECKSUM_BYTES: Final = 16
#: Behind magic and checksum: bytes of data, unit, slots, bytes of a token, nonce, bytes of the identity.
HEADER: Final = struct.Struct("<QQQQ16sQ")
HEADER_AT: Final = len(MAGIC) + CHECKSUM_BYTES
#: The last words of the header page, outside the checksum: offset + 1 and time of Until.
UNTIL_AT: Final = PAGE - 16
MAX_IDENTITY: Final = UNTIL_AT - HEADER_AT - HEADER.size
#: State, offset and size of the extent, checksum of all the others.
PLACE: Final = struct.Struct(f"<QQQ{CHECKSUM_BYTES}s")
#: Digest, capacity, length, uses, source, bytes of the user's key, which follow.
BODY: Final = struct.Struct("<20sQQdQQ")
STATE: Final = struct.Struct("<Q")
UNTIL: Final = struct.Struct("<qq")
NOT_GIVEN: Final = "does not give what was written"
#: Slots read in one call.
AT_ONCE: Final = 8192
MAX_KEY: Final = SLOT_BYTES - PLACE.size - BODY.size


class SlotState(enum.IntEnum):
    """BUSY: the bytes of its extent are incomplete, or of no one; they are overwritten at the next start."""

    FREE = 0
    BUSY = 0x4245494E4757524E
    VALID = 0x434F4D504C455445


class Until(NamedTuple):
    """The record of `worker-status` up to which every erasure was carried out. ms: its time, the broker's (Unix)."""

    offset: int
    ms: int


class SlotRecord(NamedTuple):
    """One copy as its slot describes it. uses: as the tier counts them; source: Source's value."""

    extent: Extent
    user_id: str
    digest: bytes
    capacity: int
    length: int
    uses: float
    source: int


class FileShape(NamedTuple):
    """data_bytes: of the arena, whole pages. unit: least bytes of an extent. token_bytes: of a token of a sequence.
    identity: what the copies are of; copies of another are dropped."""

    data_bytes: int
    unit: int
    token_bytes: int
    identity: str

    @property
    def slots(self) -> int:
        """One for each unit, a last shorter one included."""
        return -(-self.data_bytes // self.unit)

    @property
    def data_at(self) -> int:
        """Where the data begin in the file."""
        return PAGE + -(-self.slots * SLOT_BYTES // PAGE) * PAGE

    @property
    def file_bytes(self) -> int:
        """Of the whole file."""
        return self.data_at + self.data_bytes


class TierFile:
    """An open file, locked for this process. Made by tier_file_open.py.

    holds: whether what it held before is there. dropped: why not; "": there was nothing. data: the arena's bytes.
    One thread changes slots; `until` may be set by another.
    """

    def __init__(self, path: Path, fd: int, shape: FileShape, dropped: str = "") -> None:
        self.path = path
        self.shape = shape
        self.in_memory: Final = is_memory(os.fstat(fd).st_dev)
        self._fd = fd
        self._map = mmap.mmap(fd, shape.file_bytes)
        whole = self._whole = np.frombuffer(self._map, np.uint8)
        self.data: npt.NDArray[np.uint8] = whole[shape.data_at :]
        self._lost = ""
        header = self._get(0, PAGE)
        why = dropped or self._why_not_ours(header)
        self.holds = why is None
        self.dropped = why or ""
        self._nonce: bytes = HEADER.unpack_from(header, HEADER_AT)[4]
        if why is not None:
            self._make_anew()

    @property
    def until(self) -> Until | None:
        """Up to where every erasure was carried out; None: not known."""
        after, ms = UNTIL.unpack(self._get(UNTIL_AT, UNTIL.size))
        return Until(after - 1, ms) if after else None

    @until.setter
    def until(self, value: Until) -> None:
        if self.whole:
            self._put(UNTIL_AT, UNTIL.pack(value.offset + 1, value.ms))

    @property
    def whole(self) -> bool:
        """Whether every byte of the mapping is in the file; of a closed one, False."""
        return self._fd >= 0 and os.fstat(self._fd).st_size >= self.shape.file_bytes

    def check(self) -> None:
        """Raise DeviceError where the file was shortened, or pages were lost: what was read before may be other bytes
        than were written. Any thread may ask."""
        if not self.whole:
            raise DeviceError(
                f"`worker.dram_path`: {self.path} was shortened to {os.fstat(self._fd).st_size} of its "
                f"{self.shape.file_bytes} bytes while this worker had it: its prefix KV are lost, and the worker ends. "
                f"Leave the file alone while a worker runs; to drop it, remove it while none does"
            )
        if not self.in_memory:
            self._lost = why_lost(self._fd, self.shape.file_bytes) or self._lost
        if self._lost:
            raise self._failed("did not take what was written", self._lost)

    def fetch(self, extent: Extent) -> None:
        """Have the extent's bytes in memory. Raises DeviceError where the disk does not give them."""
        self._fetch(self.shape.data_at + extent.offset, extent.size)

    # ---- slots ----

    def begin(self, extent: Extent) -> None:
        """The extent's bytes are about to be written."""
        place = PLACE.pack(SlotState.FREE, extent.offset, extent.size, bytes(CHECKSUM_BYTES))
        self._put(self._at(extent), place)
        self._set(extent, SlotState.BUSY)

    def commit(self, record: SlotRecord) -> bool:
        """The copy is whole. False, and it stays BUSY, for a user's key of more than MAX_KEY bytes."""
        extent, key = record.extent, record.user_id.encode()
        if len(key) > MAX_KEY:
            return False
        body = BODY.pack(*record[2:], len(key)) + key
        checksum = self._checksum(extent, body)
        self._set(extent, SlotState.BUSY)
        place = PLACE.pack(SlotState.BUSY, extent.offset, extent.size, checksum)
        self._put(self._at(extent), place + body)
        self._set(extent, SlotState.VALID)
        return True

    def disown(self, extent: Extent, *, lasting: bool = False) -> None:
        """The copy is no user's entry from now on. lasting: whatever happens to the host."""
        self._set(extent, SlotState.BUSY)
        if lasting:
            self._flush(self._at(extent), SLOT_BYTES)

    def own_again(self, extent: Extent) -> None:
        """Take `disown` back, of a copy that was committed."""
        if any(PLACE.unpack(self._get(self._at(extent), PLACE.size))[3]):
            self._set(extent, SlotState.VALID)

    def clear(self, extent: Extent, wiped: slice | None) -> None:
        """The extent is free. wiped: the part of its bytes to overwrite with zeros, unless the disk does not give them;
        None: all, and on the disk, too."""
        self.disown(extent, lasting=wiped is None)
        try:
            self.fetch(extent)
        except DeviceError:
            if wiped is None:
                raise
        else:
            part = self.data[extent.offset : extent.end]
            part[wiped or slice(None)] = 0
        if wiped is None:
            self._flush(self.shape.data_at + extent.offset, extent.size)
        self._clear_slot(extent.offset // self.shape.unit)

    def forget(self, extent: Extent) -> None:
        """Clear the slot alone: its bytes may be another copy's."""
        self._clear_slot(extent.offset // self.shape.unit)

    def sync(self) -> None:
        """Have all that was written on the disk, whatever happens to the host."""
        self._written(partial(os.fdatasync, self._fd))

    def records(self) -> Iterator[SlotRecord | str]:
        """The valid records, or why one is none. Slots without a valid one are cleared, extents of BUSY ones wiped."""
        for index, slot in self._slots():
            state, offset, size, checksum = PLACE.unpack_from(slot)
            extent = Extent(offset, size)
            if not self._in_place(index, extent):
                self._clear_slot(index)
                yield "damaged"
            elif state != SlotState.VALID:
                self.clear(extent, slice(None))
                yield "incomplete"
            elif (record := self._read(slot, extent, checksum)) is None:
                self._clear_slot(index)
                yield "damaged"
            else:
                yield record

    def close(self) -> None:
        """Release the lock; the mapping ends with its last view."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)
        self._fd = -1

    def drop(self, why: str) -> None:
        """Drop all that it holds from an earlier process. Raises CapacityError where its room was taken meanwhile."""
        self.holds, self.dropped = False, why
        self._make_anew()

    # ---- inside ----

    def _get(self, at: int, nbytes: int) -> bytes:
        """Bytes in front of the data. Raises DeviceError where the disk does not give them, or the file ends before."""
        try:
            found = os.pread(self._fd, nbytes, at)
        except OSError as error:
            raise self._failed(NOT_GIVEN, os.strerror(error.errno or errno.EIO)) from error
        if len(found) < nbytes:
            self.check()
            raise self._failed(NOT_GIVEN, f"{len(found)} of {nbytes} bytes")
        return found

    def _put(self, at: int, data: bytes) -> None:
        """Write in front of the data. Raises as _get."""
        self._written(partial(os.pwrite, self._fd, data, at))

    def _slots(self) -> Iterator[tuple[int, bytes]]:
        """The slots that are not free, and their indices, as they are when those before them have been seen to."""
        for first in range(0, self.shape.slots, AT_ONCE):
            many = min(AT_ONCE, self.shape.slots - first)
            slots = self._get(PAGE + first * SLOT_BYTES, many * SLOT_BYTES)
            states = np.frombuffer(slots, np.uint64)[:: SLOT_BYTES // STATE.size]
            for index in np.flatnonzero(states).tolist():
                yield first + index, slots[index * SLOT_BYTES : (index + 1) * SLOT_BYTES]

    def _flush(self, at: int, nbytes: int) -> None:
        """Have these bytes on the disk, whatever happens to the host."""
        self._written(partial(self._map.flush, *_pages(at, nbytes)))

    def _written(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            self._lost = os.strerror(error.errno or errno.EIO)
            raise self._failed("did not take what was written", self._lost) from error

    def _fetch(self, at: int, nbytes: int) -> None:
        start, nbytes = _pages(at, nbytes)
        if not self.in_memory and (why := why_absent(self._whole[start:].ctypes.data, nbytes)):
            raise self._failed(NOT_GIVEN, why)

    def _failed(self, what: str, why: str) -> DeviceError:
        return DeviceError(f"`worker.dram_path`: the disk of {self.path} {what} ({why}); name a folder on another one")

    def _at(self, extent: Extent) -> int:
        return PAGE + extent.offset // self.shape.unit * SLOT_BYTES

    def _set(self, extent: Extent, state: SlotState) -> None:
        self._put(self._at(extent), STATE.pack(state))

    def _clear_slot(self, index: int) -> None:
        at = PAGE + index * SLOT_BYTES
        self._put(at, STATE.pack(SlotState.BUSY))  # until nothing of the record is left
        self._put(at + STATE.size, bytes(SLOT_BYTES - STATE.size))
        self._put(at, STATE.pack(SlotState.FREE))

    def _in_place(self, index: int, extent: Extent) -> bool:
        """Whether a slot's extent is one that its process could have had there."""
        unit, most = self.shape.unit, self.shape.data_bytes
        aligned = not (extent.offset | extent.size) % PAGE
        return aligned and extent.offset // unit == index and unit <= extent.size <= most - extent.offset

    def _read(self, slot: bytes, extent: Extent, checksum: bytes) -> SlotRecord | None:
        digest, capacity, length, uses, source, key_bytes = BODY.unpack_from(slot, PLACE.size)
        end = PLACE.size + BODY.size + key_bytes
        if not 1 <= key_bytes <= MAX_KEY or checksum != self._checksum(extent, slot[PLACE.size : end]):
            return None
        try:
            user_id = slot[end - key_bytes : end].decode()
        except UnicodeDecodeError:
            return None
        return SlotRecord(extent, user_id, digest, capacity, length, uses, source)

    def _checksum(self, extent: Extent, body: bytes) -> bytes:
        """Of a slot's place and the bytes behind it; of this file alone."""
        return blake2b(struct.pack("<QQ", *extent) + body, key=self._nonce, digest_size=CHECKSUM_BYTES).digest()

    def _header(self, nonce: bytes) -> bytes:
        shape, identity = self.shape, self.shape.identity.encode()[:MAX_IDENTITY]
        fields = HEADER.pack(shape.data_bytes, shape.unit, shape.slots, shape.token_bytes, nonce, len(identity))
        return fields + identity

    def _why_not_ours(self, header: bytes) -> str | None:
        """Why nothing in the file is taken; None: it is this worker's, of this identity and shape."""
        if not any(header[:HEADER_AT]):
            return "its header is gone" if any(True for _ in self._slots()) else ""  # new
        nbytes = int(HEADER.unpack_from(header, HEADER_AT)[5])
        fields = header[HEADER_AT : HEADER_AT + HEADER.size + min(nbytes, MAX_IDENTITY)]
        if header[: len(MAGIC)] != MAGIC or header[len(MAGIC) : HEADER_AT] != _header_checksum(fields):
            return "its header is none of this release, or damaged"
        data, unit, _, token_bytes, nonce, _ = HEADER.unpack_from(fields)
        if fields == self._header(nonce):
            return None
        theirs = fields[HEADER.size :].decode(errors="replace")
        if theirs != self.shape.identity:
            return f"it is of {theirs}, this worker of {self.shape.identity}"
        return f"it has {data} bytes in units of {unit}, {token_bytes} a token; now {self.shape[:3]}"

    def _make_anew(self) -> None:
        """Drop all that there is, and write the header last."""
        self._put(0, bytes(PAGE))
        os.ftruncate(self._fd, 0)  # what was there is gone from the disk, too; no view has been read yet
        allocate(self.path, self._fd, self.shape.file_bytes)
        self._nonce = os.urandom(16)
        fields = self._header(self._nonce)
        self._put(HEADER_AT, fields)
        self._put(0, MAGIC + _header_checksum(fields))


def _pages(at: int, nbytes: int) -> tuple[int, int]:
    """The same part of a file from the beginning of a page on."""
    start = at // mmap.PAGESIZE * mmap.PAGESIZE
    return start, at + nbytes - start


def allocate(path: Path, fd: int, nbytes: int) -> None:
    """Give a file every block of so many bytes: a write to a mapping that finds none ends the process.

    Raises CapacityError where there is no room; the file is empty then, since a part of it would only fill the disk.
    """
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.ftruncate(fd, 0)
        raise CapacityError(
            f"`worker.dram_path`: {path} cannot have its {nbytes} bytes: {error.strerror}; make room there, or lower "
            f"worker.dram_bytes"
        ) from error


def _header_checksum(fields: bytes) -> bytes:
    return blake2b(fields, digest_size=CHECKSUM_BYTES).digest()
