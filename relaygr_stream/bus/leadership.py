"""A lock among processes: who owns the only lane of a consumer group leads, the others stand by.

It is no fence: a process that was stopped for a while still believes that it leads until it hears of the group again.
What a leader writes needs an epoch by which readers tell an old leader's record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final, Self

from relaygr_stream.bus.membership import Membership
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.clocks import Clock


class Leadership:
    """Membership in a group over a topic of one partition, of which nothing is read here.

    It is lost kafka.session_timeout_ms after this process ends or stalls, at once when it stops in order.
    """

    def __init__(self, kafka: Kafka, *, topic: str, group: str, member: str, clock: Clock = time.monotonic) -> None:
        self._membership = Membership(kafka, topics=[topic], group=group, member=member, capacity=1.0, owner=self)
        self._session_s = kafka.session_timeout_ms / 1e3
        self._clock = clock
        self._owned = False
        self._doubted_until_s = 0.0
        self._background: Final = Background()

    @property
    def leads(self) -> bool:
        """Whether this process leads, as far as it knows."""
        return self._owned and self._clock() >= self._doubted_until_s

    @property
    def trouble(self) -> str | None:
        """Why nobody may lead: the group has members that are not of this program. None if all is well."""
        return self._membership.strangers or None

    def doubt(self) -> None:
        """Another process has acted as the leader: lead no more, until the group would have said who does."""
        self._doubted_until_s = self._clock() + self._session_s

    def check(self) -> None:
        """Raise what ended the membership: BrokerError, ConfigError."""
        self._background.check()

    async def __aenter__(self) -> Self:
        """Join the group. Raises BrokerUnavailable, BrokerError, ConfigError."""
        await self._membership.start()
        self._background.start(self._membership.poll())
        self._background.start(self._membership.look())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave it: another process leads at once."""
        self._owned = False
        await self._background.end()
        await self._membership.stop()

    # ---- called by the membership ----

    @property
    def progressing(self) -> bool:
        """Always: the loop that would be stuck is the one that asks."""
        return True

    def on_assigned(self, lanes: frozenset[int], *, continuous: bool) -> None:
        """Lead with the lane, stand by without."""
        del continuous
        self._owned = bool(lanes)

    def committable(self, *, leaving: bool) -> Mapping[tuple[str, int], tuple[int, str]]:
        """Nothing is read, so nothing is committed."""
        del leaving
        return {}
