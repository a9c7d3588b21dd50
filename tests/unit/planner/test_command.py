"""`relaygr planner` and `relaygr plan` as an operator runs them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from prometheus_client import CollectorRegistry

from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.cli.main import main
from relaygr_stream.ops.planner.metrics import PlannerMetrics
from relaygr_stream.ops.planner.process import PlannerOptions, run_planner
from relaygr_stream.ops.planner.seen import Observation
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.planner_status import REASON_KINDS, FleetPlan, ScenarioPlan
from relaygr_stream.wire.topic_files import load_topics
from tests.unit.planner.test_observing import COUNTERS, status
from tests.unit.planner.worlds import SEARCH, World, group
from tests.waiting import until

FLEET = """
[scenario.feed]
slo_ms = 50.0
[scenario.search]
slo_ms = 20.0
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def fleet(tmp_path: Path) -> str:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET)
    return str(file)


@pytest.fixture
def day(tmp_path: Path) -> Path:
    """An hour in which search needs a third worker from the twentieth minute on, and nobody acts."""
    feed = Scenario(name="feed")
    world = World(
        [feed, SEARCH], {"feed": 3, "search": 2}, lambda at: {"feed": 1.2, "search": 2.5 if at > 1200 else 1.5}
    )
    lines = []
    for _ in range(360):
        lines.append(msgspec.json.encode(world.look()))
        world.now += 10.0
    file = tmp_path / "day.ndjson"
    file.write_bytes(b"\n".join(lines))
    return file


def test_a_recorded_day_is_told_by_its_changes(fleet: str, day: Path) -> None:
    done = run("plan", "replay", str(day), "--config", fleet)
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if line.startswith("1970")]
    assert "search 2, wants 2" in lines[0]
    (first,) = [line for line in lines if "proposes to move a worker from feed to search" in line][:1]
    assert "1970-01-01 00:2" in first
    assert "rankings/s" in done.output


def test_a_recorded_day_says_when_scenarios_had_better_share_a_group(fleet: str, tmp_path: Path) -> None:
    looks = [
        Observation(
            at_s=at,
            groups={
                "feed": group(2, 20.0, p=20.0, r=7.0, late=at > 10),
                "search": group(2, 40.0, p=2.0, r=5.0, late=at > 10),
            },
        )
        for at in (0.0, 10.0, 1000.0)
    ]
    file = tmp_path / "day.ndjson"
    file.write_bytes(b"\n".join(map(msgspec.json.encode, looks)))
    done = run("plan", "replay", str(file), "--config", fleet)
    first, second = (line for line in done.output.splitlines() if line.startswith("1970"))
    assert "one group" not in first
    assert "1970-01-01 00:16:40" in second
    assert "; proposes one group for feed and search (served_by): they have one model, and " in second


def test_a_recorded_day_as_lines_has_a_plan_for_each_observation(fleet: str, day: Path) -> None:
    done = run("plan", "replay", str(day), "--config", fleet, "--json")
    found = [json.loads(line) for line in done.output.splitlines()]
    assert len(found) == 360
    assert found[-1]["move"]["target"] == "search"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has no observation"),
        (b"\n\n", "has no observation"),
        (b"{", "line 1: no observation"),
        (b"\xff\xfe", "line 1: no observation"),
        (b'{"at_s": 1, "groups": {}}\n{"at_s": "x", "groups": {}}', "line 2: no observation"),
        (b'{"at_s": 1, "groups": {}, "surprise": 1}', "line 1: no observation"),
        (b'{"at_s": 2, "groups": {}}\n{"at_s": 1, "groups": {}}', "in the order of time"),
        (b"[" * 100_000, "line 1: no observation"),
        (b'{"at_s": NaN, "groups": {}}', "line 1: no observation"),
        (b'{"at_s": 1e300, "groups": {}}', "line 1: no observation"),
        (b'{"at_s": 1e12, "groups": {}}', "line 1: no observation"),  # no calendar has that year
        (b'{"at_s": 1, "groups": {"feed": {"per_second": -1}}}', "line 1: no observation"),
        (b'{"at_s": 1, "groups": {"feed": {"workers": [{"name": "w", "busy": 2}]}}}', "line 1: no observation"),
    ],
)
def test_what_is_no_recorded_day_is_said(fleet: str, tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "odd.ndjson"
    file.write_bytes(content)
    done = run("plan", "replay", str(file), "--config", fleet)
    assert done.exit_code == 1
    assert said in done.output
    assert "Traceback" not in done.output


def test_a_file_that_is_not_there_is_named(fleet: str, tmp_path: Path) -> None:
    done = run("plan", "replay", str(tmp_path / "none"), "--config", fleet)
    assert done.exit_code == 1
    assert "No such file" in done.output


@pytest.mark.parametrize("command", [["planner"], ["plan", "replay", "x"]])
def test_without_scenarios_there_is_nothing_to_plan(command: list[str]) -> None:
    done = run(*command)
    assert done.exit_code == 1
    assert "[scenario.NAME]" in done.output


def test_gauges_are_those_of_the_newest_plan() -> None:
    registry = CollectorRegistry()
    metrics = PlannerMetrics(registry)
    for wanted, headroom, kind in ((3, None, "late"), (4, 12.5, "demand")):
        each = ScenarioPlan(workers=2, wanted=wanted, demand=3.4, headroom_ms=headroom, reason_kind=kind)
        metrics.show(FleetPlan(at_s=0.0, scenarios={"feed": each}))
    labels = {"scenario": "feed"}
    assert registry.get_sample_value("relaygr_workers_wanted", labels) == 4
    assert registry.get_sample_value("relaygr_workers_current", labels) == 2
    assert registry.get_sample_value("relaygr_slo_headroom_seconds", labels) == pytest.approx(0.0125)
    reasons = {
        kind: registry.get_sample_value("relaygr_workers_wanted_reason", labels | {"reason": kind})
        for kind in REASON_KINDS
    }
    assert reasons == dict.fromkeys(REASON_KINDS, 0) | {"demand": 1}


async def test_a_planner_publishes_what_it_sees_and_takes_it_back_when_it_stops(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    settings = Settings(kafka=embedded_settings, scenarios=(Scenario(name="feed"),))
    feed = settings.serving("feed")
    for kafka in (settings.kafka, feed.kafka):
        await apply_topics(kafka)
    at = [
        *(
            "--set",
            f"kafka.bootstrap={embedded_settings.bootstrap}",
            "--set",
            f"kafka.prefix={embedded_settings.prefix}",
        ),
        *("--set", f"kafka.partitions={embedded_settings.partitions}", "--set", "kafka.replication=1"),
    ]

    async def shown() -> Result:
        return await asyncio.to_thread(run, "plan", "show", "--json", *at)

    none = await shown()
    assert none.exit_code == 1
    assert "no planner has published a plan" in none.output
    context = ProcessContext(settings, asyncio.Event(), CollectorRegistry())
    record = tmp_path / "seen.ndjson"
    planner = asyncio.ensure_future(run_planner(context, PlannerOptions(0.2, record)))
    plan: dict[str, Any] = {}

    async def states() -> bool:
        """The worker states itself, and the plan has it."""
        nonlocal plan
        assert not planner.done(), planner
        value = encode(status("w1", 1.0, COUNTERS))
        await producer.send_and_wait(load_topics(feed.kafka).worker_status.name, value, key=b"w1")
        found = await shown()
        plan = json.loads(found.output)["plan"]["scenarios"] if found.exit_code == 0 else {}
        return bool(plan) and plan["feed"]["workers"] == 1

    async with Producer(feed.kafka, client_id="test") as producer:
        await until(states, "the plan has the worker")
    assert plan["feed"]["wanted"] == 1
    assert context.registry.get_sample_value("relaygr_workers_current", {"scenario": "feed"}) == 1
    text = await asyncio.to_thread(run, "plan", "show", *at)
    assert "no worker should move now" in text.output
    context.stop.set()
    await planner
    assert (await shown()).exit_code == 1
    assert b'"name":"w1"' in record.read_bytes().splitlines()[-1]
