"""Details of refusals and errors go into dead letters, answers and logs as they are: none names a user."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from relaygr_stream.errors import CacheCorruption
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.records import HEADER_DETAIL
from relaygr_stream.wire.topic_files import lane_of
from tests.unit.engine.worlds import World
from tests.unit.trigger.parts import event
from tests.unit.trigger.processes import peer_on, trigger_on
from tests.waiting import until

USER = "alice@example.com"


async def test_of_an_event_on_the_wrong_lane(embedded_settings: Kafka) -> None:
    with capture_logs() as logs:
        async with peer_on(embedded_settings) as peer, trigger_on(embedded_settings):
            wrong = (lane_of(USER, peer.topics.lanes) + 1) % peer.topics.lanes
            await peer.publish_raw(encode(event(25, "r", USER)), wrong, USER.encode())
            await until(lambda: len(peer.letters) == 1)
            detail = dict(peer.letters[0].headers)[HEADER_DETAIL]
            assert b"belongs on partition" in detail
            assert USER.encode() not in detail
    (line,) = [line for line in logs if line["event"] == "event unreadable"]
    assert USER not in str(line)


def test_of_books_that_do_not_balance() -> None:
    shared = World()
    shared.signal("r", 123456, 100)
    shared.settle()
    entry = shared.scheduler.pins.entry("r")
    assert entry is not None
    shared.scheduler.cache.pin(entry)  # for no request
    with pytest.raises(CacheCorruption, match="an entry of 100 tokens has 2 pins") as broken:
        shared.scheduler.check_integrity()
    assert "123456" not in str(broken.value)
    shared.scheduler.cache.unpin(entry)
    shared.scheduler.check_integrity()
    shared.close()
