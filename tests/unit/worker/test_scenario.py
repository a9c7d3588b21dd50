"""A worker and a trigger of a scenario's group say its name wherever they tell of themselves."""

from __future__ import annotations

import msgspec

from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.messages import PreInferSignal
from relaygr_stream.wire.records import HEADER_SCENARIO, Record, kind_of
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.trigger_status import KIND, read_trigger
from relaygr_stream.wire.worker_status import WITHIN_SLO, StatusReader
from tests.unit.trigger import processes
from tests.unit.trigger.parts import event
from tests.unit.worker.services import Peer, worker_on, worker_settings
from tests.waiting import until


async def test_a_workers_status_metrics_and_dead_letters_have_its_scenario(embedded_settings: Kafka) -> None:
    plain = worker_settings(embedded_settings)
    feed = Scenario(name="feed", slo_ms=70.0, model="tests.unit.worker.services:faulty")
    settings = msgspec.structs.replace(plain, scenarios=(feed,)).serving("feed")
    async with Peer(settings.kafka) as peer, worker_on(settings) as worker:
        await until(lambda: peer.statuses, "a status")
        assert {status.scenario for status in peer.statuses} == {"feed"}
        samples = [sample for family in worker.context.registry.collect() for sample in family.samples]
        (build,) = [sample for sample in samples if sample.name == "relaygr_build_info"]
        assert (build.labels["process"], build.labels["scenario"]) == ("worker", "feed")
        await peer.send_ranking(b"\x00")
        answer = await peer.rank("r", "u", 20, scenario="another")  # its group says who serves it, not the message
        assert (await peer.reply(answer)).status == "ok"
        assert worker.total("scenario_unknown") == 1
        await until(lambda: peer.dead, "the dead letter")
        assert dict(peer.dead[0].headers)[HEADER_SCENARIO] == b"feed"


async def test_a_group_of_two_tells_of_each_by_its_own_slo(embedded_settings: Kafka) -> None:
    """The feed's SLO is one that every answer keeps, that of the search page none."""
    feed = Scenario(name="feed", slo_ms=60_000.0, model="tests.unit.worker.services:faulty")
    search = Scenario(name="search", slo_ms=0.01, served_by="feed", model=feed.model)
    plain = worker_settings(embedded_settings)
    # Chunks, and so what the worker takes for late, as without scenarios: only what is told is looked at.
    plain = msgspec.structs.replace(plain, worker=msgspec.structs.replace(plain.worker, max_ranking_delay_ms=10.0))
    settings = msgspec.structs.replace(plain, scenarios=(feed, search)).serving("search")
    async with Peer(settings.kafka) as peer, worker_on(settings) as worker:
        for number, scenario in enumerate(("feed", "search", "search", "video")):
            answer = await peer.reply(await peer.rank(f"r{number}", "u", 20, scenario=scenario))
            assert answer.status == "ok"
        assert worker.total("scenario_unknown") == 1, "video is served as the group's own"
        await peer.send_ranking(encode(msgspec.structs.replace(event(25), scenario="search")))
        await until(lambda: peer.dead, "the dead letter")
        assert dict(peer.dead[0].headers)[HEADER_SCENARIO] == b"search", "the message says so, whatever lacks in it"

        def counters(scenario: str) -> dict[str, float]:
            return peer.statuses[-1].scenarios[scenario].counters  # type: ignore[index]

        def answers(scenario: str) -> float:
            told = counters(scenario)
            return sum(total for name, total in told.items() if name.startswith("answers_"))

        await until(lambda: peer.statuses and answers("feed") == answers("search") == 2, "a status after the answers")
        assert (counters("feed")[WITHIN_SLO], counters("search")[WITHIN_SLO]) == (2, 0)
        assert peer.statuses[-1].counters[WITHIN_SLO] == 2
        value = worker.context.registry.get_sample_value
        for scenario, within in (("feed", 2.0), ("search", 0.0)):
            assert value("relaygr_rankings_within_slo_total", {"scenario": scenario}) == within
        samples = [sample for family in worker.context.registry.collect() for sample in family.samples]
        told = {s.labels["scenario"] for s in samples if s.name == "relaygr_answers_total" and s.value}
        assert told == {"feed", "search"}


async def test_a_triggers_signals_and_status_have_the_scenario(embedded_settings: Kafka) -> None:
    statuses: list[Record] = []
    topic = load_topics(embedded_settings).worker_status.name
    async with (
        processes.peer_on(embedded_settings) as peer,
        TopicTail(embedded_settings, topic, [0], "latest", statuses.extend),
        processes.trigger_on(embedded_settings, scenario="feed"),
    ):
        await peer.publish(event(25, "r1", "u", scenario="feed"))
        await peer.publish(event(25, "r2", "v"))
        await peer.publish(event(25, "r3", "w", scenario="video"))  # its group says who serves it
        await until(lambda: len(peer.signals) == 3, "the signals")
        found = [decode(PreInferSignal, record.value) for record in peer.signals]
        assert {each.request_id: each.scenario or "" for each in found} == {"r1": "feed", "r2": "", "r3": "video"}
        await until(lambda: any(kind_of(record.headers) == KIND for record in statuses), "the trigger's status")
    stated = [read_trigger(record, StatusReader()) for record in statuses if kind_of(record.headers) == KIND]
    assert {status.scenario for status in stated if status is not None} == {"feed"}
