"""What `relaygr status` shows of a fleet, and what it finds odd."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from relaygr_stream.fleet import DROP_AFTER_S
from relaygr_stream.ops.status.moving import moves
from relaygr_stream.ops.status.odd import oddities
from relaygr_stream.ops.status.overview import OfScenario, Overview
from relaygr_stream.ops.status.table import as_json, render
from relaygr_stream.settings.scenarios import RESERVE
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.telemetry.printable import render_plain
from relaygr_stream.wire.assignments import Assignments
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import CostModel, GivenUp, ScenarioTotals, WorkerStatus
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.routes import Figures, RolloutProgress, Routes
from relaygr_stream.wire.signature import Signer
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.trigger_status import PolicyStatus, TriggerStatus, encode_trigger
from relaygr_stream.wire.worker_status import DELEGATED_PINNED, HEADER_INCARNATION, StatusReader
from tests.statuses import lane_statuses, worker_status
from tests.waiting import Clock

MIB = 1 << 20
SETTINGS = Settings(kafka=Kafka(partitions=4))
LANES = range(4)
SIGNALS = {"signals": 1.0}


def worker(name: str = "w1", lanes: range = LANES, budget: int = 128 * MIB, **changes: Any) -> WorkerStatus:
    plain = worker_status(
        name,
        lane_statuses(lanes, budget_bytes=budget, pinned_bytes=MIB),
        costs=CostModel(c0=1, c1=1, c2=0, c3=0),
        bytes_per_token=4096,
        alloc_bytes=4096,
        queue_ms=1.25,
        model_version="m1",
        version="0.1.0",
        hbm_bytes=1 << 30,
        hbm_used_bytes=1 << 29,
        dram_bytes=2 << 30,
        counters={"signals": 8.0, "outcome_hbm": 6.0, "outcome_dram": 1.0, "outcome_full": 3.0, "answers_ok": 10.0},
    )
    return msgspec.structs.replace(plain, **changes)


def trigger(name: str = "t1", lanes: range = LANES, **changes: Any) -> TriggerStatus:
    policy = PolicyStatus(stale_ms=1000.0, life_ms=2000.0, max_prefix_tokens=4096)
    plain = TriggerStatus(
        name=name,
        incarnation=1,
        host="h",
        pid=1,
        sent_ms=1,
        state="serving",
        group="relaygr.trigger",
        lanes=tuple(lanes),
        policy=policy,
        version="0.1.0",
        decisions={"admitted": 3.0, "stale": 1.0},
    )
    return msgspec.structs.replace(plain, **changes)


def delegating() -> TriggerStatus:
    """One that gives prefills to other workers than the lanes' owners."""
    plain = trigger()
    return msgspec.structs.replace(plain, policy=msgspec.structs.replace(plain.policy, delegate=True))


def record(status: WorkerStatus | TriggerStatus, written_ms: int = 0) -> Record:
    if isinstance(status, WorkerStatus):
        return Record("s", 0, 0, written_ms, status.name.encode(), encode(status), ())
    key = f"trigger/{status.name}".encode()
    return Record("s", 0, 0, written_ms, key, encode_trigger(status), (("relaygr-kind", b"trigger"),))


def overview(*statuses: WorkerStatus | TriggerStatus) -> Overview:
    view = Overview(SETTINGS, load_topics(SETTINGS.kafka), StatusReader(len(LANES)), clock=lambda: 100.0)
    view.live = True
    view.on_records([record(status, status.sent_ms) for status in statuses])
    return view


def test_delegated_requests_have_a_column_once_there_are_any() -> None:
    assert "delegated" not in render_plain(render(overview(trigger("t"))), 80)
    text = render_plain(render(overview(trigger("t", decisions={"admitted": 3.0, "delegated": 1.0}))), 80)
    header, row = (line.split() for line in text.splitlines() if line.split()[:1] in (["trigger"], ["t"]))
    assert dict(zip(header[2:5], row[2:5], strict=True)) == {"lanes": row[2], "admitted": "75%", "delegated": "25%"}


def test_a_fleet_as_it_should_be_is_not_odd_and_reads_well_at_80_columns() -> None:
    view = overview(worker("w1", range(2)), worker("w2", range(2, 4)), trigger("trigger-some-host-12345"))
    text = render_plain(render(view), 80)
    assert "nothing is odd" in text
    assert "1 trigger(s), 2 worker(s), 4 lanes" in text
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    (first,) = [line.split() for line in lines if line.startswith("w1")]
    assert first == ["w1", "serving", "2", "70%", "100%", "1.2", "0", "50%", "of", "1G", "0%", "of", "2G"]
    (shown,) = [line.split() for line in lines if line.startswith("trigger-some-host-12345")]
    assert shown == ["trigger-some-host-12345", "relaygr.trigger", "4", "75%", "4", "0"]
    assert render_plain(render(view), 200).count("\n") == len(lines)


def test_who_stands_by_is_shown_and_is_no_worker_of_this_group() -> None:
    spare = worker("spare", range(0), state="starting", scenario=RESERVE)
    view = overview(worker("w1"), trigger(), spare)
    text = render_plain(render(view), 80)
    assert "1 trigger(s), 1 worker(s)" in text and "nothing is odd" in text and "in reserve: spare" in text
    assert [each["name"] for each in json.loads(as_json(view))["reserve"]] == ["spare"]
    moved = Assignments(epoch=1, sent_ms=1, planner="p", workers={"spare": "feed"})
    view.assignments = moved
    assert list(moves(view)) == ["spare is to move to scenario feed; it stands by"]
    gone = (HEADER_INCARNATION, str(spare.incarnation).encode())
    view.on_records([Record("s", 0, 0, 1, b"spare", None, (gone,))])
    assert not view.living_reserve()


def test_hits_are_those_since_we_look_on() -> None:
    later = worker(counters={"outcome_hbm": 6.0, "outcome_dram": 1.0, "outcome_full": 13.0})
    view = overview(worker(), later, trigger())
    (shown,) = json.loads(as_json(view))["workers"]
    assert (shown["hit_rate"], shown["hit_rate_now"]) == (0.35, 0.0)


@pytest.mark.parametrize(
    ("statuses", "line"),
    [
        (
            [trigger()],
            "no worker is ready: no request is answered; start one with `relaygr worker`, or look at its log",
        ),
        ([worker(state="starting", lanes=range(0)), trigger()], "no worker serves yet"),
        (
            [worker()],
            "no trigger runs: nothing is pre-inferred, and only users with prefix KV of earlier rankings hit; "
            "start `relaygr trigger`",
        ),
        (
            [worker(), trigger(), trigger("t2", group="relaygr.other")],
            "triggers in 2 groups (relaygr.other, relaygr.trigger): each admits on its own, so bounds are exceeded; "
            "remove trigger.group from their settings",
        ),
        ([worker(), trigger(), trigger("t2", range(2))], "lanes 0–1 are decided by t1 and t2"),
        (
            [worker(lanes=range(1, 3)), trigger()],
            "lanes without an owner: 0, 3; their rankings wait; start workers if this lasts beyond 30 s",
        ),
        (
            [worker(), worker("w3", range(0)), worker("w2", range(0)), trigger()],
            "w2, w3: no lane, and so no request: 4 lanes are shared by 3 workers; if this lasts, `relaygr lanes "
            "grow 8` adds some while everything serves",
        ),
        (
            [worker(lanes=range(3)), worker("new", range(0)), trigger()],  # the group has not settled yet
            "lanes without an owner: 3; their rankings wait; start workers if this lasts beyond 30 s",
        ),
        (
            [worker(), trigger(lanes=range(3))],
            "lanes that no trigger decides for: 3; nothing is pre-inferred there; start a trigger if this lasts "
            "beyond 30 s",
        ),
        ([worker(), trigger(version="0.2.0")], "2 versions run: 0.1.0, 0.2.0"),
        ([worker(lanes=range(2)), worker("w2", range(2, 4), model_version="m2"), trigger()], "2 models score: m1, m2"),
        (
            [worker(budget=3 * MIB), trigger()],
            "w1: its whole pinned share, 12.0 MiB, is too small for a longest prefix (4096 tokens: 16.0 MiB); raise "
            "worker.hbm_bytes or worker.pinned_share",
        ),
        (
            [
                worker(lanes=range(2), delegated_bytes=3 * MIB, counters=SIGNALS | {DELEGATED_PINNED: 2.0 * MIB}),
                worker("w2", range(2, 4), delegated_bytes=0, counters=SIGNALS | {DELEGATED_PINNED: 16.0 * MIB}),
                delegating(),
            ],
            "w1: its room for other workers' users, 5.0 MiB, is too small for a longest prefix (4096 tokens: 16.0 "
            "MiB), and none is delegated to it; raise worker.hbm_bytes",
        ),
        (
            [worker(lanes=range(2)), worker("w2", range(2, 4), counters={}, sent_ms=61_000), trigger()],
            "w2: no request for its lanes since its start",
        ),
        (
            [worker(counters=SIGNALS | {"throttled_ms": 1500.0}), trigger()],
            "w1: brokers throttled it for 1.5 s by a quota; raise the quota of its client id or user",
        ),
        (
            [worker(), msgspec.structs.replace(trigger(), throttled_ms=200.0)],
            f"{trigger().name}: brokers throttled it for 0.2 s by a quota; raise the quota of its client id or user",
        ),
        (
            [worker(counters=SIGNALS | {"signal_over_quota": 3.0}), trigger()],
            "w1: 3 announced requests pinned nothing, since their tenant had its max_pinned_bytes pinned; the "
            "worker's log names it",
        ),
        ([worker(), trigger(), worker("w2", queue_ms=-1.0)], "1 records of worker-status are ignored: invalid"),
    ],
)  # fmt: skip
def test_what_is_odd_is_named(statuses: list[WorkerStatus | TriggerStatus], line: str) -> None:
    assert oddities(overview(*statuses)) == [line]


def test_what_is_new_is_not_odd() -> None:
    new = worker("w2", range(2, 4), counters={}, sent_ms=59_000)
    assert oddities(overview(worker(lanes=range(2)), new, trigger())) == []


def test_a_bad_record_of_former_times_is_not_told_at_each_look() -> None:
    view = overview(worker(), trigger())
    view.live = False
    view.on_records([record(worker("w2", queue_ms=-1.0))])
    assert oddities(view) == []


def test_what_a_long_lived_viewer_keeps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway looks for weeks, and pods have new names at every start."""
    clock = Clock(100.0)
    reader = StatusReader(len(LANES))
    view = Overview(SETTINGS, load_topics(SETTINGS.kafka), reader, clock=clock, live=True)
    for number in range(3):
        view.on_records([record(worker(f"w{number}", range(0))), record(trigger(f"t{number}"))])
    clock.now += DROP_AFTER_S - 1
    view.on_records([record(worker("w2", range(0)))])
    clock.now += 2
    view.on_records([record(worker("new", range(0)))])
    assert (set(view.workers), set(view.triggers)) == ({"w2", "new"}, set())
    monkeypatch.setattr(reader, "most_names", 3)
    for number in range(10):
        clock.now += 1
        view.on_records([record(worker(f"v{number}", range(0)))])
    assert set(view.workers) == {"v7", "v8", "v9"}


HOURS_MS = 2 * 3_600_000


@pytest.mark.parametrize("viewer_ms", [-HOURS_MS, 0, HOURS_MS], ids=["viewer behind", "in time", "ahead"])
@pytest.mark.parametrize("sender_ms", [-HOURS_MS, 0, HOURS_MS], ids=["senders behind", "in time", "ahead"])
def test_who_ended_without_a_word_is_named_for_ten_minutes(
    monkeypatch: pytest.MonkeyPatch, sender_ms: int, viewer_ms: int
) -> None:
    """By the broker's clock: neither a sender's nor the viewer's hides a silence, or makes one."""
    now_ms = 10**12
    monkeypatch.setattr("relaygr_stream.ops.status.overview.time.time", lambda: (now_ms + viewer_ms) / 1e3)
    view = Overview(SETTINGS, load_topics(SETTINGS.kafka), StatusReader(len(LANES)), clock=lambda: 100.0)

    def written(ago_ms: int, *statuses: WorkerStatus | TriggerStatus, ahead_ms: int = sender_ms) -> None:
        sent_ms = now_ms - ago_ms + ahead_ms
        view.on_records([record(msgspec.structs.replace(each, sent_ms=sent_ms), now_ms - ago_ms) for each in statuses])

    written(700_000, worker("w8", range(0)))
    written(1000, worker("w9", range(0)), trigger("t9"), worker("w7", range(0), state="stopped"))
    view.live = True
    written(0, worker(), trigger(), worker("w6", range(0), state="draining"), ahead_ms=0)
    assert [line.split()[0] for line in oddities(view)] == ["w9", "trigger/t9"]
    tombstone = Record("s", 0, 0, now_ms, b"trigger/t9", None, (("relaygr-kind", b"trigger"),))
    view.on_records([tombstone, Record("s", 0, 0, now_ms, b"w9", None, ())])
    assert oddities(view) == []


@pytest.mark.parametrize("ahead_ms", [-HOURS_MS, HOURS_MS])
def test_a_process_with_a_clock_that_is_off_is_alive_and_told_of(ahead_ms: int) -> None:
    view = Overview(SETTINGS, load_topics(SETTINGS.kafka), StatusReader(len(LANES)), clock=lambda: 100.0)
    view.live = True
    now_ms = 10**12
    view.on_records([record(worker(sent_ms=now_ms + ahead_ms), now_ms), record(trigger(sent_ms=now_ms - 900), now_ms)])
    assert list(view.living_workers()) == ["w1"]
    (line,) = oddities(view)
    assert line.startswith(f"w1: its clock is 7200 s {'ahead of' if ahead_ms > 0 else 'behind'} the broker's")


def test_nobody_is_removed_by_who_has_not_the_secret_or_by_an_old_tombstone() -> None:
    """`relaygr status` said that no trigger ran, and lost a live worker's first status."""
    signer = Signer("a secret of the fleet")
    reader = StatusReader(len(LANES), signer, wall=lambda: 0.001)
    view = Overview(SETTINGS, load_topics(SETTINGS.kafka), reader, clock=lambda: 100.0)
    view.live = True

    def signed(plain: Record) -> Record:
        headers = signer.sign(plain.topic, plain.key or b"", plain.value, list(plain.headers))
        return plain._replace(headers=tuple(headers))

    view.on_records([signed(record(worker("w1", incarnation=7, sent_ms=1))), signed(record(trigger("t1")))])
    assert (list(view.workers), list(view.triggers)) == (["w1"], ["t1"])
    of_trigger = Record("s", 0, 0, 0, b"trigger/t1", None, (("relaygr-kind", b"trigger"),))
    of_worker = Record("s", 0, 0, 0, b"w1", None, ())
    earlier = of_worker._replace(headers=((HEADER_INCARNATION, b"6"),))
    other_kind = of_trigger._replace(headers=(("relaygr-kind", b"later"),))
    view.on_records([of_trigger, signed(other_kind), of_worker, signed(of_worker), signed(earlier)])
    assert (list(view.workers), list(view.triggers)) == (["w1"], ["t1"])
    assert view.refused == {"unsigned": 2}
    view.on_records([signed(of_trigger), signed(of_worker._replace(headers=((HEADER_INCARNATION, b"7"),)))])
    assert not (view.workers or view.triggers)


def test_lanes_that_were_added_count_once_they_are_announced_and_never_fewer() -> None:
    view = Overview(SETTINGS, load_topics(SETTINGS.kafka), StatusReader())
    lanes = view.topics.lanes
    for announced, counted in ((lanes // 2, lanes), (2 * lanes, 2 * lanes)):
        view.take_routes({"": Routes.of_one("", announced), "feed": Routes.of_one("feed", 8 * lanes)})
        assert view.topics.lanes == counted
    assert view.routes == Routes.of_one("", 2 * lanes)


def test_groups_and_the_rollout_between_them_are_shown() -> None:
    figures = {"": Figures(version="m1", answers=900, hits=0.8, p99_ms=20.0), "next": Figures(answers=300, errors=3)}
    progress = RolloutProgress(state="moving", group="next", steps=(500, 2500, 10_000), step=1, figures=figures)
    routes = Routes.of_one("", 4).moved("next", 8, 2500)
    view = Overview(SETTINGS, load_topics(SETTINGS.kafka), StatusReader())
    assert json.loads(as_json(view))["routes"] is None
    assert "rollout" not in render_plain(render(view))
    view.routes = msgspec.structs.replace(routes, rollout=progress, sent_ms=int(view.now_ms()))
    text = render_plain(render(view))
    assert "rollout to next is moving, step 2 of 3" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["default", "m1", "75%", "4", "900", "0", "0", "80%", "20.0"] in rows
    assert ["next", "25%", "8", "300", "3", "0", "0%", "0.0"] in rows
    assert max(len(line) for line in text.splitlines() if "next" in line or "default" in line) <= 80
    found = json.loads(as_json(view))["routes"]
    assert found["rollout"]["figures"]["next"]["errors"] == 3
    view.routes = msgspec.structs.replace(routes, rollout=msgspec.structs.replace(progress, state="back", reason="bad"))
    assert "rollout to next is back: bad" in render_plain(render(view))
    assert any("no worker" in line for line in oddities(view))
    view.routes = routes.moved("next", 8, 10_000)
    assert not any("no worker" in line or "no trigger" in line for line in oddities(view))


def test_a_rollout_whose_command_is_silent_is_odd_once_users_have_moved() -> None:
    def odd(age_s: float, share: int = 500, state: str = "moving") -> list[str]:
        view = Overview(SETTINGS, load_topics(SETTINGS.kafka), StatusReader())
        progress = RolloutProgress(state=state, group="next", steps=(500, 10_000))
        routes = Routes.of_one("", 4).moved("next", 4, share)
        sent_ms = view.now_ms() - int(1e3 * age_s)
        view.routes = msgspec.structs.replace(routes, rollout=progress, sent_ms=sent_ms)
        return [line for line in oddities(view) if line.startswith("rollout to next")]

    (line,) = odd(40.0)
    assert "has said nothing for 40 s" in line
    assert "run it again to go on, or `relaygr rollout --back`" in line
    assert odd(10.0) == odd(40.0, share=0) == odd(40.0, state="done") == []


def test_scenarios_are_shown_with_what_is_odd_of_each() -> None:
    view = overview()
    view.scenarios = [
        OfScenario("ads", "ads", overview()),
        OfScenario("feed", "feed", overview(worker("w1"), trigger("t"))),
    ]
    text = render_plain(render(view), 80)
    rows = [line.split() for line in text.splitlines()]
    assert ["feed", "feed", "1", "1", "4", "of", "4", "0.0", "–", "–", "–"] in rows
    assert ["ads", "ads", "0", "0", "0", "of", "4", "0.0", "–", "–", "–"] in rows
    assert "odd: scenario ads: no worker is ready" in text
    assert not any(line.startswith(("no worker", "no trigger", "scenario feed")) for line in oddities(view))
    found = json.loads(as_json(view.snapshot()))["scenarios"]
    assert [(each["scenario"], each["group"], len(each["workers"])) for each in found] == [
        ("ads", "ads", 0),
        ("feed", "feed", 1),
    ]
    assert json.loads(as_json(overview()))["scenarios"] == []


def test_of_a_shared_group_each_scenario_has_its_own_rankings_and_what_is_odd_is_said_once() -> None:
    late = {"answers_ok": 200.0, "outcome_hbm": 200.0, "within_slo": 20.0}
    good = {"answers_ok": 300.0, "outcome_hbm": 300.0, "within_slo": 300.0}
    parts = {"feed": ScenarioTotals(counters=good), "search": ScenarioTotals(counters=late)}
    both = {name: good[name] + late[name] for name in good}
    begun = {name: ScenarioTotals(counters=dict.fromkeys(late, 0.0)) for name in parts}

    def seen(scenario: str) -> Overview:
        found = overview(worker("w1", scenario="feed", scenarios=begun, counters=dict.fromkeys(both, 0.0)))
        (known,) = found.workers.values()
        known.last = msgspec.structs.replace(
            known.last, scenarios=parts, counters=both, busy_share=0.1, sent_ms=known.last.sent_ms + 10_000
        )
        found.scenario = scenario
        return found

    view = overview()
    view.assignments = Assignments(epoch=9, sent_ms=0, planner="p", workers={"w1": "feed"})
    view.scenarios = [OfScenario("feed", "feed", seen("feed")), OfScenario("search", "feed", seen("search"))]
    rows = [line.split() for line in render_plain(render(view), 80).splitlines()]
    assert [row[-1] for row in rows if row[:2] in (["feed", "feed"], ["search", "feed"])] == ["100%", "10%"]
    odd = [line for line in oddities(view) if line.startswith("scenario")]
    assert [line for line in odd if line.startswith("scenario search: 180 of the last 200 rankings took longer than")]
    assert not [line for line in odd if "scenario feed" in line and "took longer" in line]
    assert len([line for line in odd if "no trigger runs" in line]) == 1
    assert not [line for line in odd if "moves to" in line or "is to move" in line]
    found = json.loads(as_json(view))["scenarios"]
    assert [each["rankings"]["within_slo"] for each in found] == [1.0, 0.1]


def test_workers_that_are_not_where_they_are_assigned_are_said_with_the_reason() -> None:
    gave_up = GivenUp(epoch=9, reason="no such folder")
    feed = overview(worker("there", assigned=9), worker("stuck", given_up=gave_up), worker("old", given_up=gave_up))
    ads = overview(worker("to-feed"), worker("leaving", state="draining"), trigger("t"))
    view = overview()
    view.scenarios = [OfScenario("feed", "feed", feed), OfScenario("ads", "ads", ads)]
    workers = {"there": "feed", "stuck": "ads", "to-feed": "feed", "leaving": "feed", "nowhere": "ads", "old": ""}
    view.assignments = Assignments(epoch=9, sent_ms=0, planner="p", workers=workers)
    assert list(moves(view)) == [
        "leaving moves to scenario feed: it leaves scenario ads",
        "old gave up its move to no scenario (no such folder); it serves scenario feed",
        "stuck gave up its move to scenario ads (no such folder); it serves scenario feed",
        "to-feed is to move to scenario feed; it serves scenario ads",
    ], "nowhere was assigned in 1970, and is an old name"
    now = int(view.now_ms())
    view.assignments = msgspec.structs.replace(view.assignments, epoch=now, workers={"nowhere": "ads", "stuck": "ads"})
    assert [*moves(view)] == [
        "nowhere moves to scenario ads: it is in no group now",
        "stuck is to move to scenario ads; it serves scenario feed",
    ], "what it gave up was an earlier epoch"
    assert "odd: nowhere moves to" in render_plain(render(view), 80)
