"""Sends copies of the old group's rankings to the new one before users move, and hears both groups' answers.

The copies' answers come on a partition of the new group's `scores`, where clients drop them as another client's.
"""

from __future__ import annotations

from typing import Final, Self

import structlog

from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.errors import BrokerError
from relaygr_stream.ops.rollout.agreement import Pairs
from relaygr_stream.ops.rollout.judgement import StepDecision
from relaygr_stream.ops.rollout.observing import WorkersView
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION
from relaygr_stream.wire.topic_files import lane_of, load_topics

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited

#: Copies are sent, and pairs judged, so often.
TURN_S: Final = 0.05
REPLY_PARTITION: Final = b"0"


class Comparison:
    """An async context, in which the models are compared. source, group: settings of the old group and of the new one.

    It reads the old group's `ranking`, from now on.
    """

    def __init__(
        self, source: Settings, group: Settings, producer: Producer, new: WorkersView, old: WorkersView
    ) -> None:
        self._topic = load_topics(group.kafka).ranking.name
        self._producer = producer
        self._views = new, old
        self._pairs = Pairs()
        self._lanes = new.lanes
        topic, lanes = load_topics(source.kafka).ranking.name, range(old.lanes)
        self._rankings = TopicTail(source.kafka, topic, lanes, "latest", self._pairs.on_rankings)

    async def __aenter__(self) -> Self:
        await self._rankings.start()
        for view in self._views:
            view.pairs = self._pairs
        return self

    async def __aexit__(self, *_: object) -> None:
        for view in self._views:
            view.pairs = None
        await self._rankings.stop()

    async def turn(self) -> StepDecision:
        """Send what is due, and judge what has come."""
        await self._rankings.listen(TURN_S)
        for request, correlation in self._pairs.take_due():
            headers = [(HEADER_CORRELATION, correlation), (HEADER_REPLY_PARTITION, REPLY_PARTITION)]
            lane, key = lane_of(request.user_id, self._lanes), request.user_id.encode()
            try:
                await self._producer.send_and_wait(
                    self._topic, encode(request), key=key, partition=lane, headers=headers
                )
            except BrokerError as error:
                limited(log.warning, "comparing")("a ranking is not compared", error=str(error))
        decision = self._pairs.decide()
        troubles = [self._rankings.trouble, *(view.answers and view.answers.trouble for view in self._views)]
        if decision.action == "stay" and (trouble := next(filter(None, troubles), None)):
            return StepDecision("stay", f"models cannot be compared: {trouble}")
        return decision
