"""Files that are opened by name: regular files only, read up to a bound, and text without a byte order mark.

A pipe would keep a process waiting, a device such as /dev/zero would fill its memory. Errors are OSErrors, as open's.
"""

from __future__ import annotations

import codecs
import errno
import os
import stat
from pathlib import Path
from typing import IO, Final

#: Bound of small files of settings, shapes and schemas: the largest packaged one has 4 kB.
MAX_TEXT_BYTES: Final = 1 << 20
#: The beginning of the file that Git leaves in place of a large one that was not fetched.
LFS_POINTER: Final = b"version https://git-lfs.github.com/spec/"

#: UTF-32 before UTF-16, whose little-endian mark is the beginning of UTF-32's.
_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
MARK: Final = "\ufeff"
_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def check_regular(path: str | Path) -> os.stat_result:
    """The status of a regular file, which is not opened. Raises OSError for anything else, links to it included."""
    try:
        found = os.stat(path)  # noqa: PTH116 - Path.stat has no other words for a NUL
    except ValueError as error:
        raise OSError(errno.EINVAL, "has a NUL in its name", str(path)) from error
    _refuse_other_kinds(found, path)
    return found


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a regular file for reading. Raises OSError, without waiting, for a pipe, a device, a socket or a folder."""
    check_regular(path)  # opening a device may already do something
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _refuse_other_kinds(os.fstat(descriptor), path)  # it may have been replaced meanwhile
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | Path, most: int = MAX_TEXT_BYTES) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises OSError."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"has more than {size_text(most)}, the bound of such a file", str(path))
    if is_pointer(data):
        raise pointer_error(path)
    return data


def read_text(path: str | Path, most: int = MAX_TEXT_BYTES) -> str:
    """The text of a regular file. Raises OSError, and UnicodeDecodeError for what is no text."""
    return decode_text(read_bytes(path, most))


def decode_text(data: bytes) -> str:
    """Text in UTF-8; in UTF-16 or UTF-32 if a byte order mark says so. No mark is left. Raises UnicodeDecodeError."""
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    return data.decode(encoding).lstrip(MARK)


def no_password() -> str:
    """For ssl's load_cert_chain, in place of OpenSSL's question at the terminal. Raises ValueError."""
    raise ValueError(
        "the key has a password: write it without one, `openssl pkey -in KEY -out FILE`, and name that file"
    )


def is_pointer(start: bytes) -> bool:
    """Whether a file with these first bytes is a pointer of Git LFS."""
    return start.startswith(LFS_POINTER)


def pointer_error(path: str | Path) -> OSError:
    """The error of a Git LFS pointer."""
    return OSError(errno.EINVAL, "is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`", str(path))


def size_text(nbytes: int) -> str:
    """A bound in bytes as messages show it."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def _refuse_other_kinds(found: os.stat_result, path: str | Path) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    kind = next((words for test, words in _KINDS if test(found.st_mode)), "no file")
    number = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL
    raise OSError(number, f"is {kind}, not a regular file", str(path))
