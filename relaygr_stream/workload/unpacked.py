"""Unpacks gzip and xz while it reads, in bounded memory, whatever the file asks for."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import zlib
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_GZIP_MAGIC: Final = b"\x1f\x8b"
_XZ_MAGIC: Final = b"\xfd7zXZ\x00"
#: Memory for unpacking xz. `xz -9` takes 65 MiB; a file may ask for 4 GiB.
MOST_XZ_BYTES: Final = 128 << 20
_CHUNK_BYTES: Final = 1 << 16

#: What damaged data raise.
UNPACK_ERRORS: Final = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)


def unpacked(raw: IO[bytes]) -> IO[bytes]:
    """The content of an open file from its start: unpacked, or the file itself. Reading raises UNPACK_ERRORS."""
    magic = raw.read(len(_XZ_MAGIC))
    raw.seek(0)
    # BufferedReader: readline on a bare GzipFile is several times slower.
    if magic.startswith(_GZIP_MAGIC):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))
    return io.BufferedReader(_Unxz(raw)) if magic == _XZ_MAGIC else raw


def stored_bytes(found: os.stat_result) -> int:
    """The bytes that a file takes on the disk: less than its size where it has holes, which read as zeros."""
    # A small file may be kept without blocks; file systems that know no blocks say 0.
    blocks: int = getattr(found, "st_blocks", 0)
    return min(found.st_size, 512 * blocks) if blocks else found.st_size


class _Unxz(io.RawIOBase):
    """xz streams one behind the other, as lzma.LZMAFile reads them, which takes no limit of memory."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._stream: lzma.LZMADecompressor | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        while True:
            data = b""
            if self._stream is None or self._stream.eof:
                data = (self._stream.unused_data if self._stream else b"") or self._raw.read(_CHUNK_BYTES)
                while data and not data.strip(b"\0"):  # padding between streams
                    data = self._raw.read(_CHUNK_BYTES)
                if not data:
                    return 0
                data = data.lstrip(b"\0")
                self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MOST_XZ_BYTES)
            elif self._stream.needs_input and not (data := self._raw.read(_CHUNK_BYTES)):
                raise EOFError("the file ends before its end-of-stream marker")
            try:
                found = self._stream.decompress(data, len(view))
            except lzma.LZMAError as error:
                if "emory" not in str(error):
                    raise
                most = MOST_XZ_BYTES >> 20
                raise lzma.LZMAError(
                    f"it asks for more than {most} MiB to be unpacked; pack it with xz -9 or less"
                ) from error
            if found:
                view[: len(found)] = found
                return len(found)
