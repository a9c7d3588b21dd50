"""Names what aiokafka leaves unnamed: error codes that it does not know, and the address of a broker that it cannot
reach. Importing this module patches aiokafka.
"""

from __future__ import annotations

import time
from typing import Any, Final

import aiokafka.client
import aiokafka.errors
import structlog
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import BrokerResponseError, KafkaError

from relaygr_stream.telemetry.limiter import LogLimiter

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited

#: Kafka's names of the codes from FIRST_UNKNOWN on (org.apache.kafka.common.protocol.Errors, 4.1); aiokafka knows some.
FIRST_UNKNOWN: Final = 73
_NAMES: Final = (
    "TOPIC_DELETION_DISABLED", "FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH", "UNSUPPORTED_COMPRESSION_TYPE",
    "STALE_BROKER_EPOCH", "OFFSET_NOT_AVAILABLE", "MEMBER_ID_REQUIRED", "PREFERRED_LEADER_NOT_AVAILABLE",
    "GROUP_MAX_SIZE_REACHED", "FENCED_INSTANCE_ID", "ELIGIBLE_LEADERS_NOT_AVAILABLE", "ELECTION_NOT_NEEDED",
    "NO_REASSIGNMENT_IN_PROGRESS", "GROUP_SUBSCRIBED_TO_TOPIC", "INVALID_RECORD", "UNSTABLE_OFFSET_COMMIT",
    "THROTTLING_QUOTA_EXCEEDED", "PRODUCER_FENCED", "RESOURCE_NOT_FOUND", "DUPLICATE_RESOURCE",
    "UNACCEPTABLE_CREDENTIAL", "INCONSISTENT_VOTER_SET", "INVALID_UPDATE_VERSION", "FEATURE_UPDATE_FAILED",
    "PRINCIPAL_DESERIALIZATION_FAILURE", "SNAPSHOT_NOT_FOUND", "POSITION_OUT_OF_RANGE", "UNKNOWN_TOPIC_ID",
    "DUPLICATE_BROKER_REGISTRATION", "BROKER_ID_NOT_REGISTERED", "INCONSISTENT_TOPIC_ID", "INCONSISTENT_CLUSTER_ID",
    "TRANSACTIONAL_ID_NOT_FOUND", "FETCH_SESSION_TOPIC_ID_ERROR", "INELIGIBLE_REPLICA", "NEW_LEADER_ELECTED",
    "OFFSET_MOVED_TO_TIERED_STORAGE", "FENCED_MEMBER_EPOCH", "UNRELEASED_INSTANCE_ID", "UNSUPPORTED_ASSIGNOR",
    "STALE_MEMBER_EPOCH", "MISMATCHED_ENDPOINT_TYPE", "UNSUPPORTED_ENDPOINT_TYPE", "UNKNOWN_CONTROLLER_ID",
    "UNKNOWN_SUBSCRIPTION_ID", "TELEMETRY_TOO_LARGE", "INVALID_REGISTRATION", "TRANSACTION_ABORTABLE",
    "INVALID_RECORD_STATE", "SHARE_SESSION_NOT_FOUND", "INVALID_SHARE_SESSION_EPOCH", "FENCED_STATE_EPOCH",
    "INVALID_VOTER_KEY", "DUPLICATE_VOTER", "VOTER_NOT_FOUND", "INVALID_REGULAR_EXPRESSION", "REBOOTSTRAP_REQUIRED",
    "STREAMS_INVALID_TOPOLOGY", "STREAMS_INVALID_TOPOLOGY_EPOCH", "STREAMS_TOPOLOGY_FENCED",
    "SHARE_SESSION_LIMIT_REACHED",
)  # fmt: skip
#: An address counts as unreachable for so long after the last attempt; aiokafka tries several times a second.
FORGET_S: Final = 30.0


class NamedError(BrokerResponseError):  # type: ignore[misc]  # aiokafka is untyped
    """A broker's error of a code that aiokafka does not know."""

    errno = -1

    def __repr__(self) -> str:
        return str(self)  # aiokafka often keeps no more of an error


class _Errors(dict[int, type[BrokerResponseError]]):
    def get(self, code: int, default: Any = None) -> Any:  # noqa: ARG002  # aiokafka's default says "unknown"
        """The class for a code; made, with Kafka's name where that is known, for a code that aiokafka does not know."""
        if code not in self:
            at = code - FIRST_UNKNOWN
            name = _NAMES[at] if 0 <= at < len(_NAMES) else "no name is known here"
            kind = type(name, (NamedError,), {"errno": code, "message": name, "__str__": _shown})
            self[code] = kind
        return self[code]


def _shown(error: NamedError) -> str:
    return f"the broker's error {error.message} (code {error.errno})"


aiokafka.errors.kafka_errors = _Errors(aiokafka.errors.kafka_errors)

_create_conn, _get_conn = aiokafka.client.create_conn, AIOKafkaClient._get_conn
_causes: dict[tuple[str, int], str] = {}  # address → why the last connection to it failed
_unreachable: dict[tuple[str, int], tuple[int, float]] = {}  # advertised address → broker, time of the last attempt


async def create_conn(host: str, port: int, **options: Any) -> Any:
    """As aiokafka's; remembers why it failed."""
    try:
        connection = await _create_conn(host, port, **options)
    except (OSError, KafkaError) as error:
        _causes[host, port] = str(error) or type(error).__name__
        raise
    _causes.pop((host, port), None)
    _unreachable.pop((host, port), None)
    return connection


async def get_conn(self: Any, node_id: Any, **options: Any) -> Any:
    """As AIOKafkaClient._get_conn; remembers, and logs, at which address a broker cannot be reached."""
    connection = await _get_conn(self, node_id, **options)
    broker = self.cluster.broker_metadata(node_id)
    address = (broker.host, broker.port) if broker is not None else None
    if connection is None and address is not None and address not in {host[:2] for host in self.hosts}:
        _unreachable[address] = (node_id, time.monotonic())
        limited(log.warning, "unreachable")("a broker cannot be reached", error=_told(address, node_id))
    return connection


aiokafka.client.create_conn, AIOKafkaClient._get_conn = create_conn, get_conn


def no_broker(bootstrap: str) -> str:
    """That no broker answers there, and why the last connections to these addresses failed."""
    failed = {f"{host}:{port}": cause for (host, port), cause in _causes.items()}
    why = "; ".join(f"{each}: {failed[each]}" for each in map(str.strip, bootstrap.split(",")) if each in failed)
    return f"no Kafka broker answers at {bootstrap}" + (f" ({why})" if why else "")


def unreachable() -> str:
    """The brokers that this process could not connect to lately at the addresses that they advertise, and what to
    change; "" if there are none. A broker at a bootstrap address is not among them."""
    lately = time.monotonic() - FORGET_S
    return "; ".join(_told(address, node) for address, (node, tried_s) in _unreachable.items() if tried_s >= lately)


def _told(address: tuple[str, int], node: int) -> str:
    return (
        f"broker {node} advertises {address[0]}:{address[1]}, which this machine cannot connect to "
        f"({_causes.get(address, 'no connection')}): start that broker or, if it runs, mend its advertised.listeners, "
        f"or this machine's name resolution and routes"
    )
