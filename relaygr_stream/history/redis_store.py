"""Histories in Redis, or in what speaks its protocol: a head and one packed string for each group of columns a user.

    PREFIX{USER}:head  PREFIX{USER}:behaviours  PREFIX{USER}:features

USER is the user with its tenant, percent-encoded; in braces, so that a cluster keeps the keys of a user together. A
read is one transaction (MULTI): head, and GETRANGE of the rows. A write is one script, which does nothing unless the
head is still the one that the write was made from: it appends (APPEND), to all rows of that head, or replaces.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, Final, cast
from urllib.parse import quote

from redis.asyncio import BlockingConnectionPool, Redis, SSLConnection
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from relaygr_stream.errors import ConfigError, HistoryUnavailable
from relaygr_stream.history.packed import Head, PackedStore, Write, decode_head, encode_head, lost_rows, unpack, widths
from relaygr_stream.settings.schema import History
from relaygr_stream.settings.tls import client_context
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.messages import tenant_key

#: Keys: head, behaviours, features. Arguments: the head that the write was made from (empty: none), the new head,
#: 1 to append, the rows of both groups, bytes that each group must have (none of one that has no rows).
_WRITE: Final = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
for group = 2, 3 do
  local size = tonumber(ARGV[group + 4])
  if size and #redis.call('GETRANGE', KEYS[group], size - 1, size) ~= 1 then return -1 end
end
for group = 2, 3 do
  if ARGV[3] == '0' then redis.call('DEL', KEYS[group]) end
  if ARGV[group + 2] ~= '' then redis.call('APPEND', KEYS[group], ARGV[group + 2]) end
end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""


#: Nothing behind a `?`: redis-py would take options there that turn checks of certificates off. Nor a name as
#: database, in place of which it would take number 0.
_URL: Final = re.compile(r"rediss?://[^/?#]+(/\d*)?")


class _TlsConnection(SSLConnection):
    """A connection with the one context of its store.

    Each of redis-py's makes one, in 40 ms on the event loop, which trusts the system's authorities besides tls.ca.
    """

    def __init__(self, *, context: ssl.SSLContext, **options: Any) -> None:
        super().__init__(**options)
        self.ssl_context.context = context


class RedisStore(PackedStore):
    """A PackedStore in Redis. Raises ConfigError for a malformed URL, or for files of [tls] that are of no use."""

    def __init__(self, settings: History) -> None:
        timeout_s = settings.timeout_ms / 1e3
        if not _URL.fullmatch(settings.store):
            raise ConfigError(
                f"history.store = {settings.store.partition('?')[0]}: write redis://HOST:PORT/DB, or rediss://… for "
                f"TLS, DB a number, and no more; history.username, RELAYGR_HISTORY_PASSWORD_FILE and [tls] are settings"
            )
        try:
            options: dict[str, Any] = dict(parse_url(settings.store))
            if settings.store.startswith("rediss://"):
                options |= {"connection_class": _TlsConnection, "context": client_context(settings)}
            pool = BlockingConnectionPool(
                username=settings.username or None,
                password=settings.password or None,
                max_connections=settings.max_reads,
                timeout=timeout_s,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),  # the worker repeats reads within a ranking's deadline
                protocol=2,
                client_name="relaygr",
                **options,
            )
        except ValueError as error:
            raise ConfigError(f"history.store = {settings.store}: {error}") from error
        self._redis = Redis(connection_pool=pool)
        self._write_script = self._redis.register_script(_WRITE)
        self._prefix = settings.prefix
        self._columns: dict[str, int] = {}  # of the last head that was read: all users have those of one model

    async def erase(self, user_id: str, tenant: str = "") -> bool:
        """As WritableStore.erase. Redis' own files (RDB, AOF) and replicas follow by their own rules."""
        async with _errors():
            return bool(await self._redis.delete(*self._keys(tenant_key(tenant, user_id))))

    async def close(self) -> None:
        """Disconnect."""
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    def _keys(self, user: str) -> list[str]:
        name = f"{self._prefix}{{{quote(user, safe='')}}}"
        return [f"{name}:head", f"{name}:behaviours", f"{name}:features"]

    async def _head(self, user: str) -> Head | None:
        async with _errors():
            found = await self._redis.get(self._keys(user)[0])
        return None if found is None else decode_head(cast("bytes", found))

    async def _rows(self, user: str, start: int, stop: int) -> tuple[Head | None, Behaviours]:
        keys = self._keys(user)
        columns = self._columns
        while True:
            async with _errors(), self._redis.pipeline(transaction=True) as together:
                together.get(keys[0])
                for key, size in zip(keys[1:], widths(columns), strict=False):
                    together.getrange(key, start * size, stop * size - 1)
                found, *groups = await together.execute()
            if found is None:
                return None, Behaviours()
            head = decode_head(found)
            if head.columns == columns:
                return head, unpack(groups, columns)
            columns = self._columns = head.columns  # so the ranges were not those of its rows: once more

    async def _write(self, user: str, write: Write) -> bool:
        before = b"" if write.before is None else encode_head(write.before)
        rows = (*write.rows, b"")[:2]
        given: list[bytes | int] = [before, encode_head(write.after), int(write.appends), *rows, *write.appends_to]
        async with _errors():
            wrote = await cast("Awaitable[int]", self._write_script(self._keys(user), given))
        if wrote < 0:
            raise lost_rows()
        return bool(wrote)


@asynccontextmanager
async def _errors() -> AsyncIterator[None]:
    """Errors of the client as HistoryUnavailable, without the commands, which name users' keys."""
    try:
        yield
    except (RedisError, OSError) as error:
        text = str(error).rpartition(" caused error: ")[2]
        raise HistoryUnavailable(f"history.store: Redis: {type(error).__name__}: {text}") from error
