"""Names of workers on one host: two fleets of `relaygr up` must not end each other's workers by equal names."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.schema import Settings


@contextlib.contextmanager
def reserved_name(name: str | None, settings: Settings) -> Iterator[str]:
    """A name that no other block on this host has in the same relay: the given one; None: the host's, or with a number.

    A file lock, so that it is free when its holder ends in any way. Raises ConfigError where the given one is taken.
    """
    with contextlib.ExitStack() as stack:
        if name is not None:
            if not _locked(stack, name, settings):
                raise ConfigError(
                    f"--name {name}: another `relaygr up` on this host runs workers of this name in this relay, and "
                    f"later ones of a name end the earlier; stop it, or give another --name"
                )
            yield name
            return
        host = socket.gethostname()
        yield next(
            each
            for each in (host if not number else f"{host}.{number}" for number in count())
            if _locked(stack, each, settings)
        )


def _locked(stack: contextlib.ExitStack, name: str, settings: Settings) -> bool:
    """Lock the name for as long as the stack; False where another has it."""
    where = f"{settings.kafka.bootstrap}\n{settings.kafka.prefix}\n{settings.worker.group}\n{name}"
    path = Path(tempfile.gettempdir()) / f"relaygr-up-{hashlib.sha256(where.encode()).hexdigest()[:16]}.lock"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:  # another user's
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return False
    stack.callback(os.close, file)
    return True
