"""Whether a worker that comes back may take its file: every erasure since its last process must be known."""

from __future__ import annotations

from pathlib import Path

import pytest

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.topic_check import FoundTopic, TopicRow
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.erase import AWAY_MS, CLOCK_MS, KEPT_MS, MARGIN_MS
from relaygr_stream.wire.messages import tenant_key
from relaygr_stream.wire.topic_files import lane_of, load_topics
from relaygr_stream.worker.restart import LAG, _why_too_late, warm_lanes
from tests.unit.cache.worlds import file_of

TOPIC = load_topics(Kafka()).worker_status


@pytest.mark.parametrize(
    ("away_ms", "configs", "why"),
    [
        (0, {}, ""),
        (AWAY_MS - 60_000, {LAG: str(KEPT_MS)}, ""),
        (AWAY_MS + 60_000, {}, "11 minutes ago"),
        (60_000 - CLOCK_MS, {}, ""),
        (-60_000 - CLOCK_MS, {}, "ends in 6 minutes: a clock is wrong"),
        (0, {LAG: "0"}, "topics apply --alter"),
        (0, {LAG: str(KEPT_MS - 1)}, "erased unseen"),
        (None, {}, "before it served"),
    ],
)
def test_what_may_be_taken(tmp_path: Path, away_ms: int | None, configs: dict[str, str], why: str) -> None:
    file = file_of(tmp_path / "f", 40)
    file.until_ms = 0 if away_ms is None else now_ms() - away_ms
    row = TopicRow(TOPIC, FoundTopic(1, 1, configs, frozenset(configs), {0: 1}))
    found = _why_too_late(file, row)
    assert found == why or (why and why in found)


def test_the_topic_keeps_requests_long_enough_by_its_own_file() -> None:
    assert TOPIC.min_compaction_lag_ms == KEPT_MS >= AWAY_MS + CLOCK_MS + MARGIN_MS


@pytest.mark.parametrize("tenant", ["", "shop"])
def test_the_lanes_it_asks_for_are_those_of_whom_it_serves_and_not_of_guests(tenant: str) -> None:
    lanes, owned = 16, {0, 3, 11}
    users = [f"user-{number}" for number in range(1000)]
    own = [user for user in users if lane_of(user, lanes) in owned]
    guests = [user for user in users if lane_of(user, lanes) not in owned][:40]
    found = warm_lanes([tenant_key(tenant, user) for user in own + guests], lanes)
    assert set(found) == owned
    counts = [sum(lane_of(user, lanes) == lane for user in own) for lane in found]
    assert counts == sorted(counts, reverse=True)
    assert warm_lanes([], lanes) == []
