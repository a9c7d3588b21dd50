"""Reads a log file, compressed (gzip, xz) or not, as numbered text lines, and refuses files that are not text.

A line that is not text (not UTF-8, or too long) becomes a `BrokenLine`, which the readers count and skip. What is read
of a file is bounded by what it takes on the disk, whether it is packed or sparse.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from relaygr_stream.errors import InputError
from relaygr_stream.settings.inputs import is_pointer, open_regular, pointer_error
from relaygr_stream.workload.unpacked import UNPACK_ERRORS, stored_bytes, unpacked

#: Longer lines are broken lines. JSON events in public logs have a few KiB; a file without newlines must not be read
#: into memory as one line.
MAX_LINE_BYTES: Final = 1 << 20
#: Bytes of a file that are examined to recognise its format.
SNIFF_BYTES: Final = 1 << 16
#: Lines between two progress callbacks: about twenty a second at a million lines a second.
PROGRESS_LINES: Final = 50_000

#: A packed log has a tenth of its size, seldom a thirtieth. A file made to keep a reader busy has a thousandth.
MOST_UNPACKED: Final = 200
#: Of the unpacked bytes so many are always read: less than a second.
FREE_UNPACKED_BYTES: Final = 16 << 20

_PARQUET_MAGIC: Final = b"PAR1"
_UTF8_BOM: Final = b"\xef\xbb\xbf"
_UTF16_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")

#: Called with (bytes read so far, bytes of the file).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class BrokenLine:
    """A skipped line, and the reason."""

    line: int  # 1 is the first line of the file (the first row of a Parquet file)
    reason: str


class TextLog:
    """An open log file; iterating yields (line number, text without its line end) or a BrokenLine."""

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self.path = path
        self.lines = 0  # lines read so far, broken ones included
        self._progress = progress
        self._raw: IO[bytes] = open_regular(path)
        found = os.fstat(self._raw.fileno())
        self._size, self._stored = found.st_size, stored_bytes(found)
        self._read = 0  # unpacked bytes
        self._stream = unpacked(self._raw)

    def __enter__(self) -> TextLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._raw.close()

    def __iter__(self) -> Iterator[tuple[int, str] | BrokenLine]:
        while data := self._readline():
            self.lines += 1
            if self.lines == 1:
                data = data.removeprefix(_UTF8_BOM)
            if self._progress is not None and self.lines % PROGRESS_LINES == 0:
                self._progress(self._raw.tell(), self._size)
            if len(data) >= MAX_LINE_BYTES and not data.endswith(b"\n"):
                self._skip_to_line_end()
                yield BrokenLine(self.lines, f"longer than {MAX_LINE_BYTES} bytes")
                continue
            try:
                yield self.lines, data.decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                yield BrokenLine(self.lines, f"not UTF-8 (byte {data[error.start]:#04x} at column {error.start + 1})")
        if self._progress is not None:
            self._progress(self._size, self._size)

    def _readline(self) -> bytes:
        if self._stream is self._raw and self._read >= self._size:
            return b""  # what is appended meanwhile is another reading's: somebody may write faster than this reads
        try:
            data = self._stream.readline(MAX_LINE_BYTES)
        except UNPACK_ERRORS as error:
            raise InputError(
                f"{self.path}: the compressed data is damaged or cut off after line {self.lines} ({error}); "
                "check that the download is complete"
            ) from error
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read after line {self.lines}: {error}") from error
        self._read += len(data)
        if self._read > most_unpacked(self._stored):
            raise InputError(
                f"{self.path}: its {self._stored} bytes on the disk unpack to more than {self._read >> 20} MiB, which "
                f"no log does; unpack it yourself if it is one"
            )
        return data

    def _skip_to_line_end(self) -> None:
        while (data := self._readline()) and not data.endswith(b"\n"):
            pass


def most_unpacked(size: int) -> int:
    """The most bytes that a file of `size` bytes on the disk may unpack to, or be read as where it is sparse."""
    return FREE_UNPACKED_BYTES + MOST_UNPACKED * size


def head(path: Path) -> bytes:
    """The first SNIFF_BYTES of the file's content, unpacked, without a byte order mark.

    Raises InputError if it cannot be a log.
    """
    try:
        if path.is_dir():
            raise InputError(f"{path} is a directory; name the log file in it")
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is no regular file; logs are read twice, which a pipe or a device does not allow")
        with open_regular(path) as raw:
            start = unpacked(raw).read(SNIFF_BYTES)
        if is_pointer(start):
            raise InputError(f"{path} {pointer_error(path).strerror}")
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except UNPACK_ERRORS as error:
        raise InputError(f"{path}: looks compressed (gzip or xz) but cannot be unpacked: {error}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputError(f"{path}: cannot be read: {error}") from error
    start = start.removeprefix(_UTF8_BOM)
    if not start.strip():
        raise InputError(f"{path} is empty; a log of interactions was expected")
    return start


def is_parquet(start: bytes) -> bool:
    """Whether a file with these first bytes is a Parquet file."""
    return start.startswith(_PARQUET_MAGIC)


def refuse_binary(path: Path, start: bytes) -> None:
    """Raise InputError if a file with these first bytes is not text."""
    if start.startswith(_UTF16_BOMS):
        raise InputError(f"{path} is UTF-16 text; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)")
    if b"\0" in start:
        raise InputError(
            f"{path} is a binary file (a zero byte at offset {start.index(0)}); expected text, gzipped text or Parquet"
        )
    if b"\n" not in start and b"\r" in start.rstrip():
        raise InputError(f"{path}: its lines end in carriage returns alone; convert them (tr '\\r' '\\n')")
