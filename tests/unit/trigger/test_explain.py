"""`relaygr explain`: the numbers are the decision's own, from a log or from what running triggers do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.away import Away
from relaygr_stream.cache.arena import Arena
from relaygr_stream.cache.memory import ALIGNMENT
from relaygr_stream.cli.explain_table import as_json, summary
from relaygr_stream.cli.main import main
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.models.importer.sasrec import SasRecChoices, model_of
from relaygr_stream.models.loading import save_checkpoint
from relaygr_stream.settings.schema import Kafka, Relay, Settings
from relaygr_stream.telemetry.background import Background
from relaygr_stream.trigger import explain, service
from relaygr_stream.trigger.decision import Policy
from relaygr_stream.trigger.explain import explain_live, running_policy
from relaygr_stream.trigger.sent import NEW_SHARE
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.topic_files import lane_of
from tests.unit.models.naive_sasrec import Shape, state_dict
from tests.unit.trigger.parts import event
from tests.unit.trigger.processes import WIDE_BOUNDS, peer_on, trigger_on
from tests.waiting import until


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Four users, sixty interactions each, in turns, a second apart."""
    lines = [f"{user}\t{100 + at % 37}\t3\t{1_000_000_000 + 4 * at + user}" for at in range(60) for user in range(4)]
    path = tmp_path / "u.data"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments])


def rows(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_each_request_of_a_log_is_decided_on_with_the_numbers_shown(log: Path) -> None:
    # Half a millisecond a token.
    result = rows(run("--events", str(log), "--requests", "20", "--costs", "0,0.5,0,0", "--speed", "1", "--json"))
    assert len(result) == 20
    seen: set[str] = set()
    for row in result:
        assert row["reason"] == "admitted"
        assert row["predicted_ms"] == row["tokens"] / 2
        before = row["user_id"] in seen  # then the owner has most of it
        assert row["cost_ms"] == pytest.approx(row["predicted_ms"] * (NEW_SHARE if before else 1.0))
        seen.add(row["user_id"])
        assert row["lane"] == lane_of(row["user_id"], 64)
        assert row["outstanding_bytes"] + row["nbytes"] <= row["budget_bytes"]
        assert (row["owner"], row["signalled"]) == ("worker-0", None)
    assert [row["at_s"] for row in result] == [float(at) for at in range(20)]  # the log's own time


def test_what_has_no_room_is_admitted_and_the_numbers_show_it(log: Path) -> None:
    """Its owner refuses it, or has room by then."""
    common = ("--events", str(log), "--requests", "100", "--rate", "500", "--costs", "0,1,0,0", "--json")
    crowded = rows(run(*common, "--set", "worker.hbm_bytes=1MiB", "--set", "worker.pinned_share=0.2"))
    assert {row["reason"] for row in crowded} == {"admitted"}
    assert max(row["wait_ms"] for row in crowded) > 0
    assert any(row["outstanding_bytes"] + row["nbytes"] > row["budget_bytes"] for row in crowded)


def test_prefix_kv_of_one_size_for_any_history_have_their_bytes(log: Path, tmp_path: Path) -> None:
    shape = Shape("gsasrec", items=200)
    model = model_of(tmp_path, state_dict(shape), SasRecChoices(shape.heads)).model
    save_checkpoint(model, tmp_path / "model")
    found = rows(
        run("--events", str(log), "--requests", "20", "--set", f"model.checkpoint={tmp_path / 'model'}", "--json")
    )
    assert {row["nbytes"] for row in found} == {Arena(ALIGNMENT, ALIGNMENT).round_up(model.layout.nbytes(1))}


def test_the_table_shows_what_was_compared_and_sums_up(log: Path) -> None:
    result = run("--events", str(log), "--requests", "5", "--costs", "0,0.5,0,0", "--speed", "1")
    assert result.exit_code == 0
    assert "predicted ms" in result.stdout
    assert result.stdout.count(" admitted") == 6
    assert "5 requests: admitted 5 (100%)" in result.stdout
    shown, found, counts = run("--events", str(log), "--requests", "100", "--only", "stale").stdout.partition(
        "100 requests: "
    )
    assert found
    assert "admitted" in counts
    assert "admitted" not in shown


def test_a_gap_of_the_log_takes_no_time_and_changes_nothing(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = 0
    take = OwnerDirectory.take

    def counted(*arguments: Any) -> None:
        nonlocal statuses
        statuses += 1
        take(*arguments)

    monkeypatch.setattr(OwnerDirectory, "take", counted)
    lines, found = log.read_text(encoding="utf-8").splitlines(), []
    for gap in (400, 3000):  # seconds
        late = [line.rpartition("\t") for line in lines[120:]]
        path = tmp_path / f"{gap}.data"
        text = [*lines[:120], *(f"{head}\t{int(time) + gap}" for head, _, time in late)]
        path.write_text("\n".join(text) + "\n", encoding="utf-8")
        statuses = 0
        result = rows(run("--events", str(path), "--requests", "180", "--costs", "0,1,0,0", "--speed", "1", "--json"))
        assert statuses < 4 * (180 + 60)  # 4 a second, of which the gap has a minute at most
        found.append(result)
    for name in ("budget_bytes", "outstanding_bytes", "wait_ms"):
        assert [row[name] for row in found[0]] == pytest.approx([row[name] for row in found[1]]), name
    assert [row["reason"] for row in found[0]] == [row["reason"] for row in found[1]]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "give either --events FILE or --seconds N"),
        (("--events", "x", "--seconds", "1"), "give either --events FILE or --seconds N"),
        (("--events", "no-such-file"), "no-such-file: no such file"),
        (("--seconds", "1", "--only", "luck"), "--only luck: no such decision; write one of admitted"),
        (("--events", "LOG", "--costs", "1,2"), "--costs 1,2: write four or five numbers"),
        (("--events", "LOG", "--costs", "1,2,3,-4"), "no coefficient may be negative"),
        (("--events", "LOG", "--costs", "0,0,0,0"), "a trigger takes no costs that are all 0"),
        (("--events", "LOG", "--costs", "1,nan,0,0"), "not finite"),
        (("--events", "LOG", "--costs", "1e300,0,0,0"), "or this large"),
        (("--events", "LOG", "--rate", "1", "--speed", "1"), "give one of them"),
        (("--seconds", "1", "--costs", "1,1,1,1"), "leave out --costs"),
        (("--seconds", "1", "--rate", "20"), "leave out --rate"),
        (("--seconds", "1", "--workers", "1"), "leave out --workers"),
    ],
)
def test_bad_input_is_said_in_words(arguments: tuple[str, ...], complaint: str, log: Path) -> None:
    result = run(*(str(log) if argument == "LOG" else argument for argument in arguments))
    assert result.exit_code in (1, 2)
    assert complaint in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("given", "variable", "said"),
    [
        (("--bootstrap", "127.0.0.1:1"), "", "which flag for kafka.bootstrap names"),
        ((), "127.0.0.1:1", "which environment RELAYGR_KAFKA_BOOTSTRAP names"),
    ],
)
def test_where_no_worker_runs_what_named_the_brokers_is_said(
    given: tuple[str, ...], variable: str, said: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nobody(_: object) -> None:
        return None

    monkeypatch.setattr("relaygr_stream.trigger.explain.stated_by_a_worker", nobody)
    monkeypatch.setenv("RELAYGR_KAFKA_BOOTSTRAP", variable) if variable else None
    result = run("--events", str(log), *given)
    assert result.exit_code == 1
    assert f"no worker runs at 127.0.0.1:1, {said}" in result.output


@pytest.mark.stack
async def test_a_live_sample_sees_what_the_running_trigger_does_and_disturbs_nothing(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = asyncio.Event()

    class Opened(Background):
        async def until(self, work: Coroutine[Any, Any, Any]) -> Any:
            opened.set()  # the sample starts with its first wait
            return await super().until(work)

    monkeypatch.setattr(explain, "Background", Opened)
    monkeypatch.setattr(explain, "SIGNAL_S", 5.0)
    async with peer_on(embedded_settings) as peer, trigger_on(embedded_settings) as trigger:
        settings = Settings(kafka=embedded_settings, trigger=WIDE_BOUNDS)
        policy = Policy.from_settings(settings)
        looking = asyncio.create_task(explain_live(settings, policy, 4.0, Away()))
        await until(lambda: opened.is_set() or looking.done(), "the sample has started")
        sent = 0
        while not looking.done() and sent < 40:
            await peer.publish(event(25 if sent % 2 else 0, str(sent), str(sent % 4)))
            sent += 1
            await asyncio.sleep(0.02)
        found = await looking
        await until(lambda: trigger.decided == sent)
        assert trigger.decisions("admitted") == sent // 2
    assert found
    for row in found:
        assert row.reason == ("admitted" if row.tokens else "empty_prefix")
        assert row.signalled == bool(row.tokens)
        assert (row.owner, row.predicted_ms) == ("w", float(row.tokens))
    assert summary(found).startswith(f"{len(found)} requests")
    assert len(as_json(found).splitlines()) == len(found)


@pytest.mark.stack
async def test_the_running_triggers_settings_decide_and_without_one_those_given_here(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a trigger shows itself, with what it decided, until it stops in order: also one whose clock is hours off."""
    monkeypatch.setattr("relaygr_stream.trigger.statement.now_ms", lambda: now_ms() - 7_200_000)
    monkeypatch.setattr(service, "FINAL_STATUS_S", 20.0)
    monkeypatch.setattr("relaygr_stream.ops.status.overview.LISTEN_S", 6.0)
    here = Settings(kafka=embedded_settings)
    flags = ["--bootstrap", embedded_settings.bootstrap, "--set", f"kafka.prefix={embedded_settings.prefix}"]
    flags += ["--set", f"kafka.partitions={embedded_settings.partitions}"]

    def shown() -> dict[str, Any]:
        result = CliRunner().invoke(main, ["status", "--json", *flags])
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return found

    async with peer_on(embedded_settings) as peer:
        assert await running_policy(here) == (
            Policy.from_settings(here),
            "no trigger runs there: decided with the settings given here",
        )
        async with trigger_on(embedded_settings, relay=Relay(max_prefix_tokens=77)) as trigger:
            await peer.publish(event(25, "r", "u"))
            await until(lambda: trigger.decided == 1)
            overview = await asyncio.to_thread(shown)
            (stated,) = overview["triggers"]
            assert stated["lanes"] == list(range(peer.topics.lanes))
            assert stated["decisions"] == {"admitted": 1.0}
            assert [each["name"] for each in overview["workers"]] == ["w"]
            policy, whose = await running_policy(here)
            assert policy.max_prefix_tokens == 77
            assert whose == f"decided with the settings of {stated['name']}, which runs"
        assert "no trigger runs" in (await running_policy(here))[1]
        gone = await asyncio.to_thread(shown)
        assert (gone["triggers"], gone["silent"]) == ([], [])
        assert any(line.startswith("no trigger runs: nothing is pre-inferred") for line in gone["odd"])


async def test_costs_come_from_a_worker_where_there_is_one(embedded_settings: Kafka, log: Path) -> None:
    kafka = embedded_settings
    flags = ["--bootstrap", kafka.bootstrap, "--set", f"kafka.prefix={kafka.prefix}"]
    for name in ("partitions",):
        flags += ["--set", f"kafka.{name}={getattr(kafka, name)}"]
    arguments = ("--events", str(log), "--requests", "3", "--json", *flags)
    async with peer_on(kafka) as peer:
        await peer.producer.send_and_wait(peer.topics.worker_status.name, encode(peer.status()), key=b"w")
        result = rows(await asyncio.to_thread(run, *arguments))
        assert peer.signals == []
    assert [row["predicted_ms"] for row in result] == [row["tokens"] for row in result]  # a millisecond a token
    assert all(row["nbytes"] == -(-row["tokens"] * 10 // 100) * 100 for row in result)
