"""Every error the library raises, as one tree.

RelayError
├── ConfigError              a setting is unknown, malformed or clashes with another
├── DecodeError              bytes are not a valid message of this protocol
├── BrokerError              an operation on Kafka failed
│   ├── BrokerUnavailable    no broker answers, or the local one did not start
│   │   └── PartitionsAway   no broker serves some partitions; what needs no more than the others was done
│   ├── AccessDenied         the broker refuses this client's credentials, or this client the broker's certificate
│   ├── TopicError           a topic is missing, or its properties differ from its file
│   ├── MessageTooLarge      a message is larger than the topic or the broker takes
│   └── CoPartitionError     topics that must share lanes have unequal partition counts
│       └── LanesChanged     the cluster has another number of lanes than this process serves or sends to
├── ModelError               a model or checkpoint cannot be loaded or breaks the model's contract
│   └── FactoryError         a user's factory raised
├── CapacityError            the memory budget is too small for the settings
├── CacheCorruption          the cache's tables and its memory disagree: a bug of this package
├── DeviceError              the device is absent or failed
├── HistoryError             a user's history cannot be read from the store
│   ├── HistoryUnavailable   the store does not answer in time, or refuses
│   └── HistoryMismatch      the store has another history than a reference says
├── InputError               a file given by the user has no usable content
├── Superseded               a later incarnation of this worker's name runs
└── RequestError             one request got no scores; the client raises these
    ├── DeadlineExceeded     no answer, or the answer `deadline_exceeded`, within the timeout; a TimeoutError
    ├── Overloaded           the worker refused early rather than answer late
    ├── Rejected             the request itself is invalid; sending it again cannot help
    ├── UnknownScenario      no group of workers serves the request's scenario
    └── WorkerFailed         the worker failed while it held the request
"""

from __future__ import annotations

from collections.abc import Mapping


class RelayError(Exception):
    """Root of every error raised by this package."""


class ConfigError(RelayError):
    """A setting is unknown, malformed or clashes with another; the message names it and its source."""


#: Why bytes are not a valid message; used in metrics and dead letters.
REASONS = ("oversized", "malformed", "unknown_version", "invalid", "crashed")
#: The reason of a valid request at which several workers in a row ended (bus/crashes.py).
CRASHED = "crashed"


class DecodeError(RelayError):
    """Bytes that are not a valid message.

    `reason` is one of REASONS.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class BrokerError(RelayError):
    """An operation on Kafka failed."""


class BrokerUnavailable(BrokerError):
    """No broker answers at the bootstrap address, or the local broker did not start."""


class PartitionsAway(BrokerUnavailable):
    """No broker serves some partitions, which the message names; what needs no more than the others was done."""


class AccessDenied(BrokerError):
    """The broker refuses this client's credentials or certificate, or this client refuses the broker's certificate."""


class TopicError(BrokerError):
    """A topic is missing or differs from its file."""


class MessageTooLarge(BrokerError):
    """A message is larger than the topic or the broker takes."""


class CoPartitionError(BrokerError):
    """Topics that must share lanes have unequal partition counts; the message names topics and counts."""


class LanesChanged(CoPartitionError):
    """The cluster has another number of lanes than this process serves or sends to; the message names both."""

    def __init__(self, counts: Mapping[str, int], served: int) -> None:
        found = ", ".join(f"{name} has {count} partitions" for name, count in counts.items())
        super().__init__(
            f"{found}, this process knows {served} lanes: messages are sent to lanes that no process serves. Stop all "
            f"processes and start them again; see "
            f"docs/how-to/kafka.md, 'Change the number of lanes'"
        )
        self.counts = dict(counts)
        self.served = served

    def __reduce__(self) -> tuple[type[LanesChanged], tuple[dict[str, int], int]]:
        return type(self), (self.counts, self.served)  # for copy(): each caller of a client raises its own copy


class ModelError(RelayError):
    """A model or checkpoint cannot be loaded, or breaks the model protocol."""


class FactoryError(ModelError):
    """A user's factory raised an exception that is none of this package's; it is the cause of this one."""


class CapacityError(RelayError):
    """A memory budget is too small for the settings; the message names the numbers that clash."""


class CacheCorruption(RelayError):
    """The cache's tables and its memory disagree. Always a bug of this package."""


class DeviceError(RelayError):
    """The device is absent, lacks its driver or failed."""


class HistoryError(RelayError):
    """A user's history cannot be read from the store."""


class HistoryUnavailable(HistoryError):
    """The history store does not answer in time, or refuses; asking again may help."""


class HistoryMismatch(HistoryError):
    """The history store has another history than a reference says; the message names both digests."""


class InputError(RelayError):
    """A file given by the user has no usable content; the message says what was expected."""


class Superseded(RelayError):
    """A later incarnation of this worker's name runs; this process must stop."""


class RequestError(RelayError):
    """One request got no scores."""


class DeadlineExceeded(RequestError, TimeoutError):
    """No scores within the caller's timeout."""


class Overloaded(RequestError):
    """Refused early instead of answered late; retry later or on another relay."""


class Rejected(RequestError):
    """The request itself is invalid; sending it again cannot help."""


class UnknownScenario(RequestError):
    """No routes name a group of workers that serves the request's scenario, which the message names."""


class WorkerFailed(RequestError):
    """The worker failed while it held the request."""
