"""How this package's clients reach Kafka: the one place where aiokafka's connection options are set.

Also turns aiokafka's errors into ours. Knows nothing of topics, groups or messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    KafkaConnectionError,
    KafkaError,
    TopicAuthorizationFailedError,
)

import relaygr_stream.bus.lost_connection  # noqa: F401  # before any client is made
from relaygr_stream.bus.security import security_options
from relaygr_stream.errors import AccessDenied, BrokerError, BrokerUnavailable, ConfigError
from relaygr_stream.settings import Kafka

#: Wait between attempts. A broker's restart takes seconds; ten attempts a second from each client are no load.
RETRY_BACKOFF_MS: Final = 100

_NOT_GRANTED: Final = (
    TopicAuthorizationFailedError, GroupAuthorizationFailedError, ClusterAuthorizationFailedError
)  # fmt: skip


def bootstrap_addresses(kafka: Kafka) -> list[str]:
    """HOST:PORT of each broker named. ConfigError where it is a URL, which may hold a password: it is not quoted."""
    if "@" in kafka.bootstrap or "/" in kafka.bootstrap:
        raise ConfigError(
            "`kafka.bootstrap` is a URL, or holds a password: write HOST:PORT[,HOST:PORT…], the user in "
            "kafka.sasl_username and the password in RELAYGR_KAFKA_SASL_PASSWORD_FILE"
        )
    return [address.strip() for address in kafka.bootstrap.split(",") if address.strip()]


def client_options(kafka: Kafka, client_id: str) -> dict[str, Any]:
    """Keyword arguments that every aiokafka client (producer, consumer, admin) is made with. Raises ConfigError."""
    return {
        "bootstrap_servers": bootstrap_addresses(kafka),
        "client_id": client_id,
        "request_timeout_ms": kafka.request_timeout_ms,
        "retry_backoff_ms": RETRY_BACKOFF_MS,
        **security_options(kafka),
    }


@contextmanager
def typed_errors(kafka: Kafka, doing: str) -> Iterator[None]:
    """Raise aiokafka's errors as BrokerUnavailable or BrokerError; `doing` says what could not be done."""
    try:
        yield
    except (KafkaError, OSError) as error:  # a TimeoutError is an OSError
        raise broker_error(kafka, doing, error) from error


def broker_error(kafka: Kafka, doing: str, error: BaseException) -> BrokerError:
    """The error to raise in place of aiokafka's."""
    if isinstance(error, (KafkaConnectionError, OSError)):
        return BrokerUnavailable(
            f"cannot {doing}: no Kafka broker answers at {kafka.bootstrap}; start one there, or name another with "
            f"kafka.bootstrap (RELAYGR_KAFKA_BOOTSTRAP)"
        )
    if isinstance(error, _NOT_GRANTED):
        return AccessDenied(
            f"cannot {doing}: user {kafka.sasl_username or 'of this certificate or address'!r} lacks an ACL "
            f"({type(error).__name__}: {error}); docs/security.md lists the grants of each process"
        )
    return BrokerError(f"cannot {doing} (brokers at {kafka.bootstrap}): {error!r}")
