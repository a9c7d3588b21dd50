"""Publishes this trigger's status once a second: its lanes, its settings, its decisions by reason.

If the broker is away, that status is skipped; nothing waits for it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import NamedTuple, Protocol

import msgspec
import structlog

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.throttling import throttled_ms
from relaygr_stream.errors import BrokerError
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.telemetry.process import version
from relaygr_stream.trigger.decision import Policy, Reason
from relaygr_stream.wire.erase import Erase
from relaygr_stream.wire.records import HEADER_KIND
from relaygr_stream.wire.trigger_status import KEY_PREFIX, KIND, PolicyStatus, TriggerStatus, encode_trigger
from relaygr_stream.wire.worker_status import StatusReader, rising_ms

log = structlog.get_logger(__name__)
limited = LogLimiter().limited


class Stated(NamedTuple):
    """What a trigger states of its lanes. decisions: since its start."""

    lanes: tuple[int, ...]
    decisions: Mapping[Reason, int]
    backlog: int


class StatedTrigger(Protocol):
    """What a trigger's status tells, and who carries out what `worker-status` asks for."""

    def stated(self) -> Stated:
        """What there is to tell now."""

    async def erase(self, erase: Erase) -> None:
        """Drop a user."""


class TriggerStatements:
    """Publishes statuses of `trigger` on a topic, in its name; at once when a user is erased (Eraser)."""

    def __init__(
        self,
        settings: Settings,
        topic: str,
        name: str,
        producer: Producer,
        reader: StatusReader,
        trigger: StatedTrigger,
    ) -> None:
        self._group = settings.kafka.prefix + settings.trigger.group
        self._scenario = settings.scenario or msgspec.UNSET
        self._policy = policy_status(Policy.from_settings(settings))
        self._topic, self._name, self._producer, self._reader = topic, name, producer, reader
        self._trigger = trigger
        self._erased: tuple[str, ...] = ()
        self._started_ms = self._sent_ms = now_ms()

    async def publish(self, state: str = "serving") -> None:
        """Publish a status now."""
        self._sent_ms = rising_ms(self._sent_ms, now_ms())
        stated = self._trigger.stated()
        status = TriggerStatus(
            name=self._name,
            incarnation=self._started_ms,
            host=socket.gethostname(),
            pid=os.getpid(),
            sent_ms=self._sent_ms,
            state=state,
            group=self._group,
            lanes=stated.lanes if state == "serving" else (),
            policy=self._policy,
            version=version(),
            decisions={reason: float(count) for reason, count in stated.decisions.items() if count},
            backlog=stated.backlog,
            throttled_ms=throttled_ms(),
            erased=self._erased or msgspec.UNSET,
            scenario=self._scenario,
        )
        await self._send(encode_trigger(status))

    async def erase(self, erase: Erase) -> None:
        """Drop a user."""
        await self._trigger.erase(erase)

    async def on_erased(self, ids: tuple[str, ...]) -> None:
        """State the requests carried out, now."""
        self._erased = ids
        await self.publish()

    async def publish_stopped(self) -> None:
        """Publish a last status, then the tombstone: the trigger stops in order."""
        await self.publish("stopped")
        await self._send(None)

    async def _send(self, value: bytes | None) -> None:
        key = (KEY_PREFIX + self._name).encode()
        headers = self._reader.signed(self._topic, key, value, [(HEADER_KIND, KIND.encode())])
        try:
            await self._producer.send_and_wait(self._topic, value, key=key, headers=headers)
        except BrokerError as error:
            limited(log.warning, "silent")("trigger status not published", error=str(error))


def policy_status(policy: Policy) -> PolicyStatus:
    """The policy as a trigger's status holds it."""
    return PolicyStatus(**asdict(policy))


def stated_policy(status: PolicyStatus) -> Policy:
    """The policy that a trigger's status holds."""
    return Policy(**{field.name: getattr(status, field.name) for field in fields(Policy)})
