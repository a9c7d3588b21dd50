"""A worker that is asked to stop leaves its lanes to the others at once, however long a session lasts."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from relaygr_stream.settings.schema import Kafka
from tests.e2e.fleet import serving_fleet

#: The lanes waited for one and a half of it on the embedded broker.
LONG_MS = 120_000


@pytest.mark.stack
async def test_lanes_of_a_worker_that_stops_do_not_wait_for_its_session(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    long = msgspec.structs.replace(embedded_settings, session_timeout_ms=LONG_MS)
    async with serving_fleet(long, tmp_path, "w1", "w2") as fleet:
        asked_at = time.monotonic()
        fleet.children["w1"].terminate()
        await fleet.lanes_settled("w2")
        assert time.monotonic() - asked_at < LONG_MS / 2000
