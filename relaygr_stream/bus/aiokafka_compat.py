"""Adaptations of aiokafka: connection options, security (SASL and TLS), records, typed errors, bounded ends.

Importing it patches aiokafka (aiokafka_patches.py, embedded.py, fetch_sessions.py). Secrets appear in no message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final

import structlog
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    KafkaConnectionError,
    KafkaError,
    NodeNotReadyError,
    TopicAuthorizationFailedError,
)

import relaygr_stream.bus.embedded  # its patches
import relaygr_stream.bus.fetch_sessions  # noqa: F401  # its patches
from relaygr_stream.bus.aiokafka_patches import RETRY_BACKOFF_MS, ClientId
from relaygr_stream.bus.broker_errors import no_broker, unreachable
from relaygr_stream.errors import AccessDenied, BrokerError, BrokerUnavailable, ConfigError
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.settings.section import MAX_PORT
from relaygr_stream.settings.tls import FILES, client_context, setting_of
from relaygr_stream.telemetry.background import Work
from relaygr_stream.wire.records import Record, as_record

log = structlog.get_logger(__name__)

#: The time limit of ending a client. It takes milliseconds if nothing is left to send, but a TLS connection waits 30 s
#: for a broker that does not answer its closing exchange (asyncio's ssl_shutdown_timeout, which aiokafka keeps).
CLOSE_S: Final = 3.0
#: The age in ms at which partition counts and leaders are asked for again; aiokafka's default is five minutes. So long,
#: a member that rejoined while a topic was missing has no lanes, and a reader believes a leader that answers errors.
METADATA_MS: Final = 10_000

#: The time limit of one wait for records: the period of an idle loop.
WAIT_MS: Final = 1000
#: Most records of one read; the rest waits as bytes. An answer to a fetch may hold half a million tiny records, which
#: would be 1 GB of objects; bounds on what waits are checked between reads.
MOST_AT_ONCE: Final = 1000

#: Refusals of an authorizer → what is not granted.
NOT_GRANTED: Final = {
    TopicAuthorizationFailedError: "topic",
    GroupAuthorizationFailedError: "group",
    ClusterAuthorizationFailedError: "cluster",
}


# Security.


def security_options(kafka: Kafka) -> dict[str, Any]:
    """aiokafka's options for `kafka.security_protocol`. Raises ConfigError if settings clash or a file is invalid."""
    protocol = kafka.security_protocol
    sasl, tls = protocol.startswith("SASL"), protocol.endswith("SSL")
    options: dict[str, Any] = {"security_protocol": protocol}
    if sasl:
        if not (kafka.sasl_username and kafka.sasl_password):
            raise ConfigError(
                f"`kafka.security_protocol` = {protocol} needs `kafka.sasl_username` and `kafka.sasl_password` "
                f"(RELAYGR_KAFKA_SASL_PASSWORD, or a settings file that others cannot read)"
            )
        if kafka.sasl_mechanism == "PLAIN" and not tls and not kafka.plain_without_tls:
            raise ConfigError(
                f"`kafka.sasl_mechanism` = PLAIN with `kafka.security_protocol` = {protocol} sends the password in the "
                f"clear; use SASL_SSL or SCRAM-SHA-512, or allow it with kafka.plain_without_tls = true"
            )
        options |= {
            "sasl_mechanism": kafka.sasl_mechanism,
            "sasl_plain_username": kafka.sasl_username,
            "sasl_plain_password": kafka.sasl_password,
        }
    elif kafka.sasl_username or kafka.sasl_password:
        raise ConfigError(
            f"`kafka.sasl_username` is set, but `kafka.security_protocol` = {protocol} sends no credentials; set it to "
            f"SASL_SSL (or SASL_PLAINTEXT inside a trusted network)"
        )
    if tls:
        options["ssl_context"] = client_context(kafka)
    else:
        given = [f"`{setting_of(name)}`" for name in FILES if getattr(kafka, name)]
        if given:
            raise ConfigError(
                f"{', '.join(given)} is set, but `kafka.security_protocol` = {protocol} does not encrypt; set it to "
                f"{'SASL_SSL' if sasl else 'SSL'}"
            )
    return options


# Ending clients within bounded time.

_late: set[asyncio.Task[None]] = set()


async def end(what: str, stop: Work, within_s: float = CLOSE_S) -> None:
    """Await stop() for at most within_s, and never fail. A client that cannot be ended in time ends with the process.

    stop() runs in its own task, because aiokafka's stop() lets the cancellation of its inner tasks escape to the caller
    (aiokafka 0.14, when a broker is away).
    """
    task = asyncio.create_task(stop(), name=f"end {what}")
    await asyncio.wait({task}, timeout=within_s)
    if not task.done():
        _late.add(task)  # keeps a reference, so that it runs on
        task.add_done_callback(_late.discard)
        log.warning("client does not end; it is left running", what=what, after_s=within_s)
    elif not task.cancelled() and (error := task.exception()) is not None:
        log.warning("ending a client failed", what=what, error=f"{type(error).__name__}: {error}")


async def end_client(what: str, client: Any, within_s: float = CLOSE_S) -> None:
    """As `end` for an AIOKafkaConsumer or AIOKafkaProducer; also closes its connections if stop() fails.

    If a fetch waits for a broker, aiokafka's stop() lets a cancellation escape before it closes the connections.
    """

    async def stop() -> None:
        try:
            await client.stop()
        finally:
            connections = client.client if hasattr(client, "client") else client._client
            await connections.close()

    await end(what, stop, within_s)


# Connection options, records and errors.


def bootstrap_addresses(kafka: Kafka) -> list[str]:
    """HOST:PORT of each broker in `kafka.bootstrap`. Raises ConfigError; it does not quote a URL."""
    if "@" in kafka.bootstrap or "/" in kafka.bootstrap:
        raise ConfigError(
            "`kafka.bootstrap` is a URL, or holds a password: write HOST:PORT[,HOST:PORT…], the user in "
            "kafka.sasl_username and the password in RELAYGR_KAFKA_SASL_PASSWORD_FILE"
        )
    addresses = [address.strip() for address in kafka.bootstrap.split(",") if address.strip()]
    for address in addresses:
        port = address.rpartition(":")[2]
        if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= MAX_PORT):
            raise ConfigError(f"`kafka.bootstrap`: {address!r}: write HOST:PORT, with a port from 1 to {MAX_PORT}")
    return addresses


def client_options(kafka: Kafka, client_id: str) -> dict[str, Any]:
    """The keyword arguments of every aiokafka client (producer, consumer, admin). Raises ConfigError."""
    return {
        "bootstrap_servers": bootstrap_addresses(kafka),
        "client_id": ClientId(client_id),
        "request_timeout_ms": kafka.request_timeout_ms,
        "retry_backoff_ms": RETRY_BACKOFF_MS,
        "metadata_max_age_ms": METADATA_MS,
        **security_options(kafka),
    }


async def read(consumer: Any) -> list[Record]:
    """The records that an AIOKafkaConsumer has within WAIT_MS, at most MOST_AT_ONCE. Raises aiokafka's errors."""
    batches = await consumer.getmany(timeout_ms=WAIT_MS, max_records=MOST_AT_ONCE)
    return [as_record(message) for messages in batches.values() for message in messages]


@contextmanager
def typed_errors(kafka: Kafka, doing: str, right: str = "READ") -> Iterator[None]:
    """Raise aiokafka's errors as BrokerUnavailable, AccessDenied or BrokerError. doing, right: as broker_error's."""
    try:
        yield
    except (KafkaError, OSError) as error:  # a TimeoutError is an OSError
        raise broker_error(kafka, doing, error, right) from error


def broker_error(kafka: Kafka, doing: str, error: BaseException, right: str = "READ") -> BrokerError:
    """The error of this package for an error of aiokafka. doing: the failed operation, in words. right: the grant that
    it needs."""
    away = unreachable()
    if away and isinstance(error, NodeNotReadyError):  # a broker answered, and referred us to this one
        return BrokerUnavailable(f"cannot {doing}: {away}")
    also = away and f"; {away}"
    if isinstance(error, (KafkaConnectionError, OSError)):
        return BrokerUnavailable(
            f"cannot {doing}: {no_broker(kafka.bootstrap)}; start one there, or name another with kafka.bootstrap "
            f"(RELAYGR_KAFKA_BOOTSTRAP){also}"
        )
    if (kind := NOT_GRANTED.get(type(error))) is not None:
        named = error.args[0] if error.args else ()
        return not_granted(kafka, doing, right, kind, [named] if isinstance(named, str) else named)
    also = also if isinstance(error, KafkaError) and error.retriable else ""
    return BrokerError(f"cannot {doing} (brokers at {kafka.bootstrap}): {error!r}{also}")


def not_granted(kafka: Kafka, doing: str, right: str, kind: str, names: Collection[str] = ()) -> AccessDenied:
    """The error for a right that this process's user lacks. kind: of the resources with these names."""
    user = repr(kafka.sasl_username) if kafka.sasl_username else "of this certificate or address"
    on = f"{kind} {', '.join(sorted(names))}".strip()
    return AccessDenied(
        f"cannot {doing}: user {user} lacks an ACL, {right} on {on}; docs/reference/security.md lists the grants "
        f"of each process"
    )
