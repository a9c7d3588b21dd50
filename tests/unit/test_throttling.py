"""For how long a broker takes nothing: never less than 0, or the sender takes a silent broker for a throttling one."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from relaygr_stream.bus.throttling import throttled_for


@pytest.mark.parametrize("ends_in_s", [None, -5.0, 5.0], ids=["never throttled", "throttled before", "throttled"])
def test_a_broker_with_a_connection_is_throttled_for_the_time_left_and_else_for_0_s(ends_in_s: float | None) -> None:
    connection = SimpleNamespace()
    if ends_in_s is not None:
        connection._relaygr_throttled_until = time.monotonic() + ends_in_s
    client = SimpleNamespace(_conns={(1, "default"): connection, (1, "coordination"): SimpleNamespace()})
    left_s = throttled_for(client, 1)
    assert left_s == 0.0 if ends_in_s != 5.0 else 0.0 < left_s <= 5.0
    assert throttled_for(client, 2) == throttled_for(client, None) == 0.0
