"""Sends that no retry mends: which topics refuse what this process sends, in words, for readiness, log and metric.

A clock that is far off, a missing ACL, a policy or a limit of the cluster: such a process looks well, owns lanes, and
none of its answers arrives.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import structlog

from relaygr_stream.errors import BrokerError, BrokerUnavailable, TopicError

log = structlog.get_logger(__name__)

#: A refusal counts until a send to the topic succeeds, or for this long where nothing more is sent to it.
COUNTS_S: Final = 60.0

#: Topic → number of messages and batches that this process sent to it and that were refused.
refusals: Final[Counter[str]] = Counter()


class RefusedTopics:
    """The topics that refused the last send of one producer. now_s: seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, str]] = {}  # by topic: when, and why

    def trouble(self, now_s: float) -> str | None:
        """Why sends are refused, for readiness; None if none are. Any thread may ask."""
        since = now_s - COUNTS_S
        return next((why for at, why in list(self._last.values()) if at > since), None)

    def failed(self, topic: str, error: BrokerError, now_s: float) -> None:
        """Record a send that failed. A broker that is away and a topic that is missing are told elsewhere."""
        if isinstance(error, BrokerUnavailable | TopicError):
            return
        refusals[topic] += 1
        if topic not in self._last:
            log.error("sends are refused", topic=topic, error=str(error))
        self._last[topic] = now_s, str(error)

    def taken(self, topic: str) -> None:
        """Record a send that succeeded."""
        if self._last and self._last.pop(topic, None) is not None:
            log.info("sends are taken again", topic=topic)
