"""Monkey patches of aiokafka 0.14: defects that its users meet when brokers, topics and leaders come and go.

They hold for all clients of the process, except where a ClientId is asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Mapping
from contextvars import ContextVar
from typing import Any, Final

from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.errors import (
    GroupCoordinatorNotAvailableError,
    IllegalGenerationError,
    KafkaConnectionError,
    KafkaError,
    NoError,
    NotCoordinatorForGroupError,
    for_code,
)
from aiokafka.protocol.commit import OffsetFetchRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.structs import BrokerMetadata

#: The pause between attempts, in ms. A broker's restart takes seconds; ten attempts a second per client are no load.
RETRY_BACKOFF_MS: Final = 100


class ClientId(str):
    """The `client_id` of this package's clients, by which `send` tells them from other clients of the process."""

    __slots__ = ()


_send = AIOKafkaConnection.send


def send(self: Any, request: Any, expect_response: bool = True) -> Any:
    """As AIOKafkaConnection.send, without four defects of aiokafka 0.14.

    - A closed asyncio transport drops what is written to it; uvloop's raises RuntimeError. aiokafka does not expect
      that, and it would end the task that sends heartbeats, and with it the process. Here: KafkaConnectionError.
    - A client that starts asks for metadata on a connection that only `bootstrap` knows. If the start is cancelled
      meanwhile, nothing closes that connection. Here the request does.
    - Every request for metadata lets the broker create the topics it names, with the cluster's number of partitions: a
      topic deleted under a running relay would come back with other lanes. Clients with a ClientId create none.
    - A client without topics, such as a member without lanes, asks for all of the cluster's every METADATA_MS: 5 µs of
      the event loop for each partition. Clients with a ClientId ask for the brokers alone.
    """
    if isinstance(request, MetadataRequest) and isinstance(self._client_id, ClientId):
        request._allow_auto_topic_creation = False
        request._topics = request._topics or []  # None: all; in the request's first version, [] as well
    try:
        answer = _send(self, request, expect_response)
    except RuntimeError as error:
        if "closed" not in str(error):
            raise
        self.close(reason=CloseReason.CONNECTION_BROKEN)
        raise KafkaConnectionError(f"Connection at {self.host}:{self.port} broken: {error}") from error
    of_a_start = self._on_close_cb is None  # the connections that a client keeps report their end to it
    return _closed_if_cancelled(self, answer) if of_a_start and expect_response else answer


async def _closed_if_cancelled(connection: Any, answer: Awaitable[Any]) -> Any:
    try:
        return await answer
    except asyncio.CancelledError:
        connection.close()
        raise


_end = AIOKafkaConnection.close


def end(self: Any, reason: CloseReason | None = None, exc: BaseException | None = None) -> Any:
    """As AIOKafkaConnection.close, without TLS's closing exchange.

    A Kafka broker that reads the end of TLS behind a request answers it only once TCP ends, for which uvloop would
    wait 30 s.
    """
    writer = self._writer
    closed = _end(self, reason, exc)
    if writer is not None and self._ssl_context is not None:
        writer.transport.abort()
    return closed


AIOKafkaConnection.send, AIOKafkaConnection.close = send, end

_close, _get_conn = AIOKafkaClient.close, AIOKafkaClient._get_conn


async def close(self: Any) -> None:
    """As AIOKafkaClient.close, which closes the connections that are there by now; `get_conn` closes later ones."""
    self._relaygr_closed = True
    await _close(self)


#: The broker that this task connects to.
_connects_to: Final[ContextVar[int | str]] = ContextVar("connects_to")


async def get_conn(self: Any, node_id: int | str, **options: Any) -> Any:
    """As AIOKafkaClient._get_conn, without two defects.

    - A connection made after the client's end is closed: nothing else would. None then, as where a broker cannot be
      reached.
    - Connections to all brokers are made one after the other, so that one that accepts and answers nothing keeps the
      client from the others, each time for a request timeout. Here each broker has a lock of its own.
    """
    token = _connects_to.set(node_id)
    try:
        connection = await _get_conn(self, node_id, **options)
    finally:
        _connects_to.reset(token)
    if connection is not None and getattr(self, "_relaygr_closed", False):
        connection.close()
        return None
    return connection


def get_conn_lock(self: Any) -> asyncio.Lock:
    """In place of AIOKafkaClient._get_conn_lock."""
    locks: defaultdict[int | str, asyncio.Lock] = vars(self).setdefault("_relaygr_locks", defaultdict(asyncio.Lock))
    return locks[_connects_to.get()]


AIOKafkaClient.close, AIOKafkaClient._get_conn = close, get_conn
AIOKafkaClient._get_conn_lock = property(get_conn_lock)

_metadata_update = AIOKafkaClient._metadata_update


async def metadata_update(self: Any, cluster: Any, topics: Any) -> bool:
    """As AIOKafkaClient._metadata_update, without two defects.

    - While a partition has no leader, the fetcher asks without a pause: 4,500 requests a second and most of a core.
      Here the same topics are asked for once in RETRY_BACKOFF_MS.
    - Only the brokers known last are asked. If all of them come back at other addresses, the client never finds them.
      Here the bootstrap addresses are asked, too, where none of the known brokers answers.
    """
    asked = frozenset(topics)
    if asked == getattr(self, "_relaygr_asked", None):
        await asyncio.sleep(self._relaygr_asked_s + RETRY_BACKOFF_MS / 1000 - time.monotonic())
    self._relaygr_asked, self._relaygr_asked_s = asked, time.monotonic()
    return await _metadata_update(self, cluster, topics) or await _ask_bootstrap(self, cluster, topics)


async def _ask_bootstrap(client: Any, cluster: Any, topics: Any) -> bool:
    nodes = {f"bootstrap-{number}": host[:2] for number, host in enumerate(client.hosts)}
    # get_conn finds the addresses there; the known brokers stay known, for some of them may be back at any moment.
    client.cluster._bootstrap_brokers = {node: BrokerMetadata(node, *host, None) for node, host in nodes.items()}
    for node in nodes:
        connection = await client._get_conn(node)
        if connection is None:
            continue
        try:
            metadata = await connection.send(MetadataRequest(list(topics) or None))
        except (KafkaError, TimeoutError):
            continue
        if metadata.brokers:
            cluster.update_metadata(metadata)
            return True
    return False


AIOKafkaClient._metadata_update = metadata_update

_do_commit_offsets, _send_req = GroupCoordinator._do_commit_offsets, GroupCoordinator._send_req


async def do_commit_offsets(self: Any, assignment: Any, offsets: Mapping[Any, Any]) -> None:
    """As GroupCoordinator._do_commit_offsets, but not for an assignment that is over.

    aiokafka repeats a commit for ever while its topic is missing, in whatever generation it is by then: the offset of a
    deleted log was written into the new one, and the records below it were skipped.
    """
    if not assignment.active:
        raise IllegalGenerationError(self.group_id)
    await _do_commit_offsets(self, assignment, offsets)


async def send_req(self: Any, request: Any) -> Any:
    """As GroupCoordinator._send_req. Raises the error of an answer to OffsetFetchRequest.

    Since version 2 the group's error stands beside an empty list of topics. aiokafka reads the list alone: "nothing was
    ever committed", and the lanes are read again from their start.
    """
    answer = await _send_req(self, request)
    if isinstance(request, OffsetFetchRequest):
        error = for_code(getattr(answer, "error_code", NoError.errno))
        if error is not NoError:
            if error in (NotCoordinatorForGroupError, GroupCoordinatorNotAvailableError):
                self.coordinator_dead()
            raise error(self.group_id)
    return answer


GroupCoordinator._do_commit_offsets, GroupCoordinator._send_req = do_commit_offsets, send_req
