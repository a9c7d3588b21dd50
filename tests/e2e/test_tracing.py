"""Traces of real requests through real processes, taken by an OTLP receiver that is not ours."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from relaygr_stream.client import RelayClient
from relaygr_stream.client.relay import HistoryOrReference, Request
from relaygr_stream.errors import Rejected
from relaygr_stream.history.store import WritableStore, open_store
from relaygr_stream.settings.schema import History, Kafka, Telemetry
from relaygr_stream.wire.behaviours import Behaviours
from tests.e2e.fleet import Fleet
from tests.otlp import Receiver, Span, receiver
from tests.waiting import until

TRACED = Telemetry(traces=True, trace_share=1.0, log_level="warning")
HISTORY = (np.arange(1, 301), np.ones(300, int), np.arange(300) * 1000)
CANDIDATES = [5, 6, 7]


def tree(spans: list[Span]) -> dict[str, list[str]]:
    """Names of the spans inside each span, by that one's name; "" for roots."""
    names = {span.id: span.name for span in spans}
    found: dict[str, list[str]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        found.setdefault(names.get(span.parent, ""), []).append(span.name)
    return {name: sorted(children) for name, children in found.items()}


async def trace_of(taps: Receiver, request_id: str, spans: int) -> list[Span]:
    """The spans of the request's trace, once there are so many."""

    def found() -> list[Span]:
        ids = {span.trace for span in taps.spans if span.attributes.get("relaygr.request_id") == request_id}
        return [span for span in taps.spans if span.trace in ids]

    await until(lambda: len(found()) >= spans, f"{spans} spans of {request_id}")
    return found()


async def a_hit(relay: RelayClient, fleet: Fleet, taps: Receiver, user_id: str, history: HistoryOrReference) -> Request:
    """A request whose ranking was sent when its prefix KV were ready."""
    async with relay.request(user_id, history, candidates=3, rank_in=1.0) as request:
        await until(lambda: request.request_id in fleet.admitted, "admitted")
        ready = lambda: any(  # noqa: E731
            span.name == "relaygr.pre-infer" and span.attributes["relaygr.request_id"] == request.request_id
            for span in taps.spans
        )
        await until(ready, "its prefix KV is ready")
        ranking = await request.rank(CANDIDATES, timeout=20.0)
    assert ranking.outcome == "hbm"
    return request


@pytest.mark.stack
async def test_a_request_is_one_trace_from_its_event_to_its_scores(
    embedded_settings: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiver(tmp_path) as taps:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", taps.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        async with Fleet(embedded_settings, tmp_path) as fleet:
            stored = History(store=f"sqlite:{tmp_path / 'histories'}", timeout_ms=20_000.0)
            fleet.use(msgspec.structs.replace(fleet.settings, telemetry=TRACED, history=stored))
            fleet.start("trigger", "trigger")
            fleet.start("worker", "w1")
            await fleet.ready("trigger", "w1")
            await fleet.lanes_settled("w1")
            await fleet.owners_known()
            store = open_store(stored)
            assert isinstance(store, WritableStore)
            await store.append("u-3", "", Behaviours.from_arrays(*HISTORY), stored.max_behaviours)
            async with RelayClient(settings=fleet.settings) as relay:
                hit = await a_hit(relay, fleet, taps, "u-1", HISTORY)
                read = await a_hit(relay, fleet, taps, "u-3", store)
                miss = relay.request("u-2", HISTORY, candidates=3)  # never announced
                full = await miss.rank(CANDIDATES, timeout=20.0)
                assert full.outcome == "full"
            spans = await trace_of(taps, hit.request_id, 9)
            assert tree(spans) == {
                "": ["relaygr.request"],
                "relaygr.request": ["relaygr.decide", "relaygr.rank"],
                "relaygr.decide": ["relaygr.pre-infer"],
                "relaygr.pre-infer": ["prefill", "queue"],
                "relaygr.rank": ["relaygr.ranking"],
                "relaygr.ranking": ["queue", "score"],
            }
            assert {span.error for span in spans} == {""}
            by_name = {span.name: span for span in spans}
            assert by_name["relaygr.ranking"].attributes["relaygr.outcome"] == "hbm"
            assert by_name["relaygr.decide"].attributes["relaygr.decision"] == "admitted"
            for span in spans:
                assert span.start <= span.end
                inside = next((each for each in spans if each.id == span.parent), span)
                assert inside.start <= span.start
            prefill = next(span for span in spans if span.name == "prefill")
            assert prefill.attributes["relaygr.computed_tokens"] == "300"
            assert prefill.end <= by_name["relaygr.ranking"].start
            missed = await trace_of(taps, miss.request_id, 5)
            assert tree(missed) == {
                "": ["relaygr.rank"],
                "relaygr.rank": ["relaygr.ranking"],
                "relaygr.ranking": ["prefill", "queue", "score"],
            }
            fetched = await trace_of(taps, read.request_id, 10)
            assert tree(fetched)["relaygr.pre-infer"] == ["fetch", "prefill", "queue"]
            assert tree(fetched)["relaygr.ranking"] == ["queue", "score"]  # its history was kept
            (fetch,) = [span for span in fetched if span.name == "fetch"]
            assert fetch.attributes["relaygr.behaviours"] == "300"
            assert fetch.end <= next(span for span in fetched if span.name == "prefill").start


@pytest.mark.stack
async def test_a_forwarded_ranking_stays_in_its_trace_and_a_refusal_is_an_error(
    embedded_settings: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiver(tmp_path) as taps:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", taps.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        async with Fleet(embedded_settings, tmp_path) as fleet:
            fleet.use(msgspec.structs.replace(fleet.settings, telemetry=TRACED))
            fleet.start("worker", "w1", "worker.max_queue=1")
            fleet.start("worker", "w2")
            await fleet.ready("w1", "w2")
            await fleet.lanes_settled("w1", "w2")
            async with RelayClient(settings=fleet.settings) as relay:
                long = (np.arange(512), np.ones(512, int), np.arange(512))
                for _ in range(20):
                    waves = (
                        relay.request(f"u-{user}", long, candidates=3).rank(CANDIDATES, timeout=20.0)
                        for user in range(24)
                    )
                    await asyncio.gather(*waves, return_exceptions=True)
                    if any(span.attributes.get("relaygr.outcome") == "forwarded" for span in taps.spans):
                        break
                with pytest.raises(Rejected):
                    await relay.request("u", long, candidates=3, request_id="wrong").rank(range(65))
            (wrong,) = await trace_of(taps, "wrong", 1)
            assert (wrong.name, wrong.error) == (
                "relaygr.rank",
                "65 candidates, the limit is 64 (relay.max_candidates)",
            )
            forwarded = [span for span in taps.spans if span.attributes.get("relaygr.outcome") == "forwarded"]
            assert forwarded
            hop = forwarded[0]

            def inside() -> dict[str, Span]:  # spans of three processes come in any order
                return {span.name: span for span in taps.spans if span.parent == hop.id}

            await until(lambda: {"forward", "relaygr.ranking"} <= inside().keys(), "the hop's own spans")
            answered = inside()["relaygr.ranking"]
            assert answered.attributes["relaygr.worker"] != hop.attributes["relaygr.worker"]
