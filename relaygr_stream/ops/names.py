"""Names of workers on one host: two fleets of `relaygr up` must not end each other's workers by equal names."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import sys
from collections.abc import Iterator
from itertools import count

from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.schema import Settings


@contextlib.contextmanager
def reserved_name(name: str | None, settings: Settings) -> Iterator[str]:
    """A name that no other block on this host has: the given one; None: the host's, or that with a number.

    A given one may be had once in each relay. Raises ConfigError where it is taken. Without effect outside Linux.
    """
    relay = "\n".join((settings.kafka.bootstrap, settings.kafka.prefix, settings.worker.group))
    with contextlib.ExitStack() as stack:
        if name is not None:
            if not _reserve(stack, f"{relay}\n{name}"):
                raise ConfigError(
                    f"--name {name}: another `relaygr up` on this host runs workers of this name in this relay, and "
                    f"later ones of a name end the earlier; stop it, or give another --name"
                )
            yield name
            return
        host = socket.gethostname()
        names = (host if not number else f"{host}.{number}" for number in count())
        yield next(each for each in names if _reserve(stack, each) and _reserve(stack, f"{relay}\n{each}"))


def _reserve(stack: contextlib.ExitStack, key: str) -> bool:
    """Take the key for as long as the stack; False where another has it.

    An abstract socket: no file stays behind, and it is free when its holder ends in any way.
    """
    if sys.platform != "linux":
        return True
    taken = stack.enter_context(socket.socket(socket.AF_UNIX))
    try:
        taken.bind(f"\0relaygr-up-{hashlib.sha256(key.encode()).hexdigest()[:32]}")
    except OSError:
        return False
    return True
