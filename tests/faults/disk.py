"""A folder on a small filesystem of its own, which a test fills to the last byte and frees again, or on a disk that
fails. Needs root. Knows nothing of who writes there; nobody may while the block begins or ends.

A small one is of tmpfs: what is in the folder when the block begins is there inside it, and what is there when it ends
is kept. A failing one is of ext4 on a loop device, whose file has more bytes than there is room for.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

#: Why a test was skipped, where not `permitted`.
HINT: Final = "run as root where filesystems may be mounted (`mount -t tmpfs`), or in a privileged container"
CHUNK: Final = bytes(1 << 20)


class SmallDisk:
    """Made by `small_disk`."""

    def __init__(self, folder: Path) -> None:
        self._ballast: Final = folder / "ballast"

    def fill(self) -> None:
        """Nobody can write a byte more, except over what they have."""
        with self._ballast.open("ab", buffering=0) as file:
            size = len(CHUNK)
            while size:
                try:
                    file.write(CHUNK[:size])
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2

    def free(self) -> None:
        """There is room again."""
        self._ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """The folder on a filesystem of so many bytes for the duration of the block."""
    aside = folder.with_name(f"{folder.name}-aside")
    folder.rename(aside)
    folder.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder))
    try:
        _move(aside, folder)
        disk = SmallDisk(folder)
        yield disk
        disk.free()
    finally:
        _move(folder, aside)
        _run("umount", "--lazy", str(folder))
        folder.rmdir()
        aside.rename(folder)


class FailingDisk:
    """Made by `failing_disk`. file: has the disk's bytes."""

    def __init__(self, folder: Path, file: Path) -> None:
        self._folder, self._file = folder, file
        self._beside: Final = SmallDisk(file.parent)

    def refuse_writes(self) -> None:
        """From now on what is written where nothing was is lost, and so is what was not on the disk yet."""
        self._beside.fill()
        subprocess.run(["sync", "-f", str(self._folder)], check=False, capture_output=True)

    def accept_writes(self) -> None:
        """There is room again."""
        self._beside.free()

    def refuse_reads(self) -> None:
        """From now on what is read is an I/O error, but for what is in memory."""
        _run("sync", "-f", str(self._folder))
        os.truncate(self._file, 0)


def drop_pages(file: Path) -> None:
    """Those that nobody has mapped leave memory, as others do where it is short."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def failing_disk(folder: Path, size_bytes: int = 64 << 20) -> Iterator[FailingDisk]:
    """The folder, which is new and empty, on a disk of so many bytes for the duration of the block."""
    under = folder.with_name(f"{folder.name}-under")
    folder.mkdir()
    under.mkdir()
    with small_disk(under, size_bytes):
        file = under / "disk"
        with file.open("wb") as opened:
            opened.truncate(2 * size_bytes)
        _run("mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=0,nodiscard", str(file))
        _run("mount", "-o", "loop", str(file), str(folder))
        try:
            yield FailingDisk(folder, file)
        finally:
            _run("umount", "--lazy", str(folder))


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """The folder is empty, and nobody can write there, for the duration of the block."""
    _run("mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder))
    try:
        yield
    finally:
        _run("umount", "--lazy", str(folder))


def permitted() -> bool:
    """Whether this process may mount filesystems."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=False, capture_output=True).returncode:
            return False
        _run("umount", folder)
    return True


def _move(source: Path, target: Path) -> None:
    """What is in one folder to the other, which is empty or not there; holes stay holes: Kafka's indexes are made of
    them."""
    _run("cp", "--archive", "--sparse=always", f"{source}/.", str(target))
    shutil.rmtree(source, ignore_errors=True)  # not the mount point itself


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
