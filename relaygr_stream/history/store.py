"""The protocol of a history store, and how the settings name one.

A history grows at its end. `read` returns behaviours of the version that was asked for, or of a later one, whose
beginning they are; readers compare digests (wire/history.py) and trust nothing else.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from importlib import import_module
from traceback import extract_tb
from typing import Final, Protocol, TypeVar, runtime_checkable

import msgspec

from relaygr_stream.errors import ConfigError, HistoryError, HistoryUnavailable, RelayError
from relaygr_stream.settings.schema import History
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.history import HistoryReference

T = TypeVar("T")

#: Schemes of history.store and what serves them; another one is a factory, MODULE:NAME.
REDIS: Final = ("redis://", "rediss://")
SQLITE: Final = "sqlite:"


@runtime_checkable
class HistoryStore(Protocol):
    """Reads users' histories. Each call raises HistoryUnavailable where the store does not answer, or refuses.

    Calls run concurrently on one event loop, and must not block it. A call that is cancelled must leave the store
    usable: callers bound the time of each.
    """

    async def reference(self, user_id: str, tenant: str = "") -> HistoryReference | None:
        """The user's history as it is now, in one read; None: the store has none, or an empty one."""
        ...

    async def read(self, user_id: str, tenant: str, version: int, start: int, stop: int) -> Behaviours:
        """The behaviours start:stop, oldest first, of this version or a later one; fewer where the store has fewer,
        none where start is not below stop.

        Their columns are those that the model reads of each behaviour (wire/features.py).
        """
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


@runtime_checkable
class WritableStore(HistoryStore, Protocol):
    """A store that `relaygr history` writes. A reader sees all of a write, or nothing of it."""

    async def append(self, user_id: str, tenant: str, behaviours: Behaviours, most: int = 0) -> HistoryReference:
        """Append behaviours, at least one, and return what the history is now.

        most: a history that would be longer loses its oldest quarter and what is above; 0: no limit. It then begins
        elsewhere, so prefix KV of before do not serve it. Writers of one user at the same time wait for each other.
        Raises InputError for behaviours that are older than the last, or have other columns; HistoryMismatch where the
        store has lost rows of what it has.
        """
        ...

    async def replace(self, user_id: str, tenant: str, behaviours: Behaviours) -> HistoryReference:
        """Make these behaviours, at least one, the user's whole history."""
        ...

    async def erase(self, user_id: str, tenant: str = "") -> bool:
        """Remove the user's history; False: there was none."""
        ...


async def looked_up(store: HistoryStore, user_id: str, tenant: str, within_s: float) -> HistoryReference | None:
    """`store.reference` within a time. Raises as `in_time`; HistoryUnavailable for an answer of another type."""
    found: object = await in_time(lambda: store.reference(user_id, tenant), within_s)
    if found is not None and not isinstance(found, HistoryReference):
        raise HistoryUnavailable(f"the history store answers with {type(found).__name__}, not with a HistoryReference")
    if found is not None:
        _check(found, HistoryReference)
    return found


async def rows_of(
    store: HistoryStore, user_id: str, tenant: str, reference: HistoryReference, start: int, within_s: float
) -> Behaviours:
    """`store.read` from start to the reference's end, within a time. Raises as `looked_up`."""
    rows: object = await in_time(
        lambda: store.read(user_id, tenant, reference.version, start, reference.length), within_s
    )
    if not isinstance(rows, Behaviours):
        raise HistoryUnavailable(f"the history store answers with {type(rows).__name__}, not with Behaviours")
    columns: object = rows.columns
    if not isinstance(columns, dict | msgspec.UnsetType) or {type(part) for part in rows.parts()} != {bytes}:
        raise HistoryUnavailable("the history store answers with Behaviours that are not made of bytes")
    _check(rows, Behaviours)
    return rows


def _check(found: msgspec.Struct, kind: type[msgspec.Struct]) -> None:
    """Raise HistoryUnavailable, naming the field, unless what a store answered could come in a message."""
    try:
        fields = {name: part for name, part in msgspec.structs.asdict(found).items() if part is not msgspec.UNSET}
        msgspec.convert(fields, kind)
        for key in fields.get("columns") or {}:
            key.encode()
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise HistoryUnavailable(f"the history store answers with no valid {kind.__name__}: {error}") from error


async def in_time(call: Callable[[], Awaitable[T]], within_s: float) -> T:
    """The result of a store's call. Raises its HistoryErrors; HistoryUnavailable if it is late or fails otherwise."""
    try:
        async with asyncio.timeout(within_s):
            return await call()
    except TimeoutError as error:
        raise HistoryUnavailable(
            f"the history store did not answer within {within_s * 1e3:g} ms (history.timeout_ms)"
        ) from error
    except HistoryError:
        raise
    except Exception as error:  # a user's own store may raise anything; the request must be answered
        raise HistoryUnavailable(f"the history store failed: {type(error).__name__}: {error}") from error


def open_store(settings: History) -> HistoryStore:
    """The store that history.store names. Connects on first use.

    Raises ConfigError: no store is set, its extra is not installed, or the factory is not one.
    """
    name = settings.store
    if name.startswith(REDIS):
        try:
            from relaygr_stream.history.redis_store import RedisStore  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(
                f"history.store = {name}: {error}; install this package with its extra `redis`"
            ) from error
        return RedisStore(settings)
    if name.startswith(SQLITE):
        from relaygr_stream.history.sqlite_store import SqliteStore  # noqa: PLC0415

        return SqliteStore(name.removeprefix(SQLITE), settings.timeout_ms / 1e3)
    return _of_factory(settings)


def _of_factory(settings: History) -> HistoryStore:
    module, _, attribute = settings.store.partition(":")
    if not attribute.isidentifier():
        raise ConfigError(
            f"history.store = {settings.store!r} names no store: set it to redis://HOST:PORT/DB, rediss://…, "
            f"sqlite:FILE, or MODULE:FACTORY"
        )
    try:
        factory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"history.store = {settings.store}: {error}") from error
    try:
        store: object = factory(settings)
    except RelayError:
        raise
    except Exception as error:  # of a user's own code
        file, line, *_ = extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"history.store = {settings.store}: {type(error).__name__}: {error} ({file}:{line})"
        ) from error
    if not isinstance(store, HistoryStore) or not inspect.iscoroutinefunction(store.read):
        raise ConfigError(
            f"history.store = {settings.store} made a {type(store).__name__}, which has not the methods of "
            f"relaygr_stream.history.store.HistoryStore"
        )
    return store
