"""Opens a DRAM tier's file: one process's by a lock, one user's by its mode 0600, and with every block allocated."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import Final

from relaygr_stream.cache.host import check_host, is_memory
from relaygr_stream.cache.tier_file import FileShape, TierFile, allocate
from relaygr_stream.errors import ConfigError

#: A killed process of 64 GiB takes seconds to end, and its lock with it.
LOCK_S: Final = 5.0


def open_tier_file(path: Path, shape: FileShape, lock_s: float = LOCK_S) -> TierFile | None:
    """The file at `path`, made if there is none, allocated whole; None: another process has it after `lock_s` seconds.

    Raises ConfigError for a path at which no file of this user can be, or be locked and mapped, CapacityError where
    disk or host has no room.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        why, what = f"{path} cannot be opened: {error.strerror}", "name a folder that this user may write to"
        if isinstance(error, FileNotFoundError):
            why, what = f"there is no folder {path.parent}", "make it, or name another"
        raise ConfigError(f"`worker.dram_path`: {why}; {what}") from error
    try:
        _check_whose(path, fd)
        if not _locked(fd, lock_s):
            os.close(fd)
            return None
        return TierFile(path, fd, shape, _allocate(path, fd, shape))
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise ConfigError(
                f"`worker.dram_path`: {path} cannot be locked, sized and mapped: {error.strerror}; name a folder of a "
                f"local disk or of memory"
            ) from error
        raise


def _check_whose(path: Path, fd: int) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(
            f"`worker.dram_path`: {path} is no file of this user (uid {os.geteuid()}): it belongs to uid "
            f"{found.st_uid}, type {stat.filemode(found.st_mode)[0]}; remove it, or name another folder"
        )


def _locked(fd: int, lock_s: float) -> bool:
    by = time.monotonic() + lock_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        else:
            return True
        if time.monotonic() >= by:
            return False
        time.sleep(0.05)


def _allocate(path: Path, fd: int, shape: FileShape) -> str:
    """Give the file its size and every block of it.

    Returns why nothing that it held may be taken; "": its size and mode are right.
    """
    found, dropped = os.fstat(fd), ""
    if stat.S_IMODE(found.st_mode) & 0o077:
        dropped = f"other users might write to it (mode {stat.S_IMODE(found.st_mode):o})"
        os.fchmod(fd, 0o600)
    elif found.st_size not in (0, shape.file_bytes):
        dropped = f"it has {found.st_size} bytes, {shape.file_bytes} are needed"
    if dropped:
        os.ftruncate(fd, 0)
        found = os.fstat(fd)
    missing = max(0, shape.file_bytes - found.st_blocks * 512)
    if is_memory(found.st_dev):
        check_host(missing, missing, "worker.dram_bytes, in memory by worker.dram_path,")
    allocate(path, fd, shape.file_bytes)
    return dropped
