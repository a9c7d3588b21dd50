"""Files of the user's: folders that travel with the program, and whether what is asked for can be written."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from pathlib import Path
from typing import Final

from relaygr_stream.errors import ConfigError

#: What is wrong with a folder, a file or a disk, and not with this program: told in one line.
FILE_TROUBLE: Final = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
    }
)
#: Room that a report or a picture needs: the largest, a page of `bench slo`, has some 300 kB.
REPORT_BYTES: Final = 1 << 20


def packaged_dir(name: str) -> Path:
    """The folder `name` as it travels with the program: beside the package in a clone, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "_files" / name
    return inside if inside.is_dir() else package.parent / name


def check_writable(path: Path, option: str, nbytes: int = REPORT_BYTES) -> None:
    """Make sure that a file of so many bytes can be written at `path` at the end of a long run; makes its folder.

    Raises ConfigError that names `option`. What stands there stays; a device or a pipe is not tried.
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
            probe.write(bytes(nbytes))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror or error}") from error


def discard_output() -> None:
    """What stdout still holds goes nowhere: it could not be written, and the interpreter would try again at its end."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
