"""Files: folders that are packaged with the program, and checks that an output file can be written."""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import IO, Final, Literal

from relaygr_stream.errors import ConfigError

#: Errors of a folder, a file or a disk, not of this program: reported in one line, without a traceback.
FILE_TROUBLE: Final = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
    }
)
#: Room for a report or a picture: the largest, a page of `bench slo`, has about 300 kB.
REPORT_BYTES: Final = 1 << 20


def packaged_dir(name: str) -> Path:
    """The packaged folder `name`: beside the package in a clone, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "_files" / name
    return inside if inside.is_dir() else package.parent / name


def check_writable(path: Path, option: str) -> None:
    """Check, before a long run, that a file of REPORT_BYTES can be written at `path`; makes its folder.

    An existing file keeps its content; a device or a pipe is not tried. Raises ConfigError, which names `option`.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
        if path.exists() and not path.is_file():
            return
        if path.exists():
            path.open("ab").close()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent) as probe:
            probe.write(bytes(REPORT_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror or error}") from error


def read_by_others(path: str | Path) -> bool:
    """Whether every user of this machine may read the file.

    Not on a file system that is mounted for reading only: so a cluster mounts secrets into a container, whose modes
    are its own and whose only user reads them.
    """
    return bool(os.stat(path).st_mode & stat.S_IROTH) and not os.statvfs(path).f_flag & os.ST_RDONLY  # noqa: PTH116


def write_private(path: Path, content: str | bytes) -> None:
    """Write a file that has histories, ids or secrets: a new one is the user's alone (0600), an old one keeps its mode.

    Raises OSError.
    """
    with private_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def private_file(path: Path, mode: Literal["wb", "ab"] = "wb") -> IO[bytes]:
    """A file opened for writing as `write_private` makes it. Raises OSError."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def discard_output() -> None:
    """Discard stdout's buffer if it cannot be written: the interpreter would otherwise try again at its end."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
