"""One worker after the other in one process: what the next one takes over, and what it must not."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.assignments import write_assignments
from relaygr_stream.bus.producer import Producer
from relaygr_stream.engine.build import WorkerRuntime, build
from relaygr_stream.errors import BrokerError, BrokerUnavailable, PartitionsAway, TopicError
from relaygr_stream.groups.live import _passes, settings_at
from relaygr_stream.groups.moves import ServedGroup
from relaygr_stream.handover.build import handover_for
from relaygr_stream.models.loading import save_random
from relaygr_stream.ops.scenarios import make_groups
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.settings.worker import Model
from relaygr_stream.telemetry.process import process
from relaygr_stream.wire.assignments import Assignments
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader
from relaygr_stream.worker.process import WorkerProcess
from relaygr_stream.worker.run import _why_not, run_worker
from tests.unit.worker import services
from tests.unit.worker.services import Peer, worker_settings
from tests.waiting import until


@pytest.mark.stack
async def test_each_worker_has_memory_and_metrics_of_its_own_and_one_that_does_not_drain_goes_back(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = msgspec.structs.replace(
        worker_settings(embedded_settings), scenarios=(Scenario(name="feed"), Scenario(name="search"))
    )
    await make_groups(base, lambda _: None)
    runtimes: list[weakref.ref[WorkerRuntime]] = []
    alive_at_builds: list[int] = []

    def building(settings: Settings, *others: Any) -> WorkerRuntime:
        services.made.clear()
        alive_at_builds.append(sum(each() is not None for each in runtimes))
        runtime = build(settings, *others)
        runtimes.append(weakref.ref(runtime))
        return runtime

    registry = CollectorRegistry()

    async def assign(producer: Producer, **workers: str) -> int:
        assignments = Assignments(epoch=now_ms(), sent_ms=now_ms(), planner="p", workers=workers)
        await write_assignments(producer, load_topics(embedded_settings), StatusReader(), assignments)
        return assignments.epoch

    feed, search = base.serving("feed"), base.serving("search")
    async with process(feed, "worker", registry=registry) as context, Peer(search.kafka) as peer:
        running = asyncio.create_task(run_worker(context, handover_for, building))
        try:
            await until(lambda: running.done() or context.why_not_ready() is None, "ready")
            assert context.why_not_ready() is None
            before = set(registry._collector_to_names)
            epoch = await assign(peer.producer, w1="search")
            reasons = list[str | None]()

            def there() -> bool:
                reasons.append(context.why_not_ready())
                return bool(peer.statuses)

            await until(there, "its status there")
            await until(lambda: peer.statuses[-1].state == "serving" and context.why_not_ready() is None, "ready")
            assert any(reason and reason.startswith("moves to scenario search: ") for reason in reasons)
            assert (peer.statuses[0].scenario, peer.statuses[-1].assigned) == ("search", epoch)
            assert registry.get_sample_value("relaygr_ready") == 1.0
            (build_info,) = [each for family in registry.collect() for each in family.samples if "build" in each.name]
            assert build_info.labels["scenario"] == "search"
            assert len(registry._collector_to_names) == len(before), "nothing of the former worker is left, or twice"

            drain = WorkerProcess._drain

            async def leaves_records(self: WorkerProcess, by: float) -> bool:
                monkeypatch.undo()
                await drain(self, by)
                return False

            monkeypatch.setattr(WorkerProcess, "_drain", leaves_records)
            await assign(peer.producer, w1="feed")
            await until(lambda: peer.statuses[-1].given_up and peer.statuses[-1].state == "serving", "gave up")
            last = peer.statuses[-1]
            assert (last.scenario, last.assigned) == ("search", epoch)
            assert last.given_up
            assert "records were left" in last.given_up.reason
            assert alive_at_builds == [0, 0, 0], "the memory of one worker is free before the next takes its own"
        finally:
            context.stop.set()
            await asyncio.gather(running, return_exceptions=True)
    running.result()


def test_a_path_of_the_record_is_a_folder_with_a_checkpoint_and_reaches_no_factory(tmp_path: Path) -> None:
    own = Settings(model=Model(layers=1, dim=8, heads=1, dqk=8, dv=8, vocab=9, checkpoint="own"))
    new = save_random(msgspec.structs.replace(own.model, checkpoint=""), tmp_path / "new").checkpoint
    place = ServedGroup("next", new)
    assert _why_not(own, place) == ""
    at = settings_at(own, place)
    assert (at.model.checkpoint, at.model.factory, at.kafka.prefix) == (new, "", own.kafka.prefix + "next.")
    assert settings_at(own, ServedGroup("")) is own
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{}")
    for bad, why in (("none", "no such folder"), ("bad", "architecture"), ("new/config.json", "no such folder")):
        assert why in _why_not(own, ServedGroup("next", str(tmp_path / bad)))
    factory = msgspec.structs.replace(own, model=Model(factory="mine:make", path=str(tmp_path)))
    assert "model.factory = mine:make" in _why_not(factory, place)
    assert settings_at(factory, place).model == Model(checkpoint=new), "which is asked before a worker leaves, too"


@pytest.mark.parametrize(
    ("error", "on_the_way", "at_home"),
    [
        (BrokerUnavailable("no broker"), True, True),
        (PartitionsAway("those of one group"), False, True),
        (TopicError("missing"), False, True),
        (BrokerError("?"), False, True),
        (ValueError("a factory's"), False, False),
    ],
)
def test_an_absent_broker_is_outlasted_and_a_group_that_cannot_be_joined_is_given_up(
    error: Exception, on_the_way: bool, at_home: bool
) -> None:
    assert (_passes(error, at_home=False), _passes(error, at_home=True)) == (on_the_way, at_home)
