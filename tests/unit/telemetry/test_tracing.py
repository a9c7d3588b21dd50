"""Trace context in headers, sampling, and collectors that are slow, away or broken, which hold up nothing."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from relaygr_stream.client import RelayClient
from relaygr_stream.errors import BrokerUnavailable, ConfigError
from relaygr_stream.settings.schema import Kafka, Settings, Telemetry
from relaygr_stream.telemetry.otlp import tracing_of
from relaygr_stream.telemetry.tracing import MAX_HEADER_BYTES, OFF, Tracing, trace_headers
from relaygr_stream.wire.records import Record
from tests.otlp import receiver
from tests.waiting import WITHIN_S, until

ON = Telemetry(traces=True)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{}"
SAMPLED, NOT_SAMPLED = (("traceparent", PARENT.format(flags).encode()) for flags in ("01", "00"))
#: Of a value of W3C's version 00; of the flags, 1 is "sampled", 2 "the trace id is random".
WRITTEN = re.compile(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-0[0-3]")


@pytest.fixture(autouse=True)
def _no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_SDK_DISABLED", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")


def record(*headers: tuple[str, bytes]) -> Record:
    return Record("ranking", 3, 17, 0, b"u", b"", headers)


async def test_a_client_that_finds_no_broker_leaves_no_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    before = set(threading.enumerate())
    with socket.socket() as nobody:  # bound, and does not listen
        nobody.bind(("127.0.0.1", 0))
        kafka = Kafka(bootstrap=f"127.0.0.1:{nobody.getsockname()[1]}")
        client = RelayClient(settings=Settings(kafka=kafka, telemetry=ON))
        with pytest.raises(BrokerUnavailable):
            await client.__aenter__()
    assert not [thread for thread in set(threading.enumerate()) - before if "Otel" in thread.name]


def of_headers(headers: list[tuple[str, bytes]]) -> tuple[str, str, str]:
    """Trace, span and flags of the written context."""
    _, trace, span, flags = dict(headers)["traceparent"].decode().split("-")
    return trace, span, flags


@pytest.fixture(autouse=True)
def _exporters_end() -> Iterator[None]:
    """The SDK's threads outlast the tests of bad collectors, and draw from `random`, which fails a property test that
    runs then."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(WITHIN_S)
        assert not thread.is_alive(), thread


async def test_off_makes_nothing() -> None:
    async with tracing_of(Telemetry(), "worker", CollectorRegistry()) as tracing:
        assert tracing is OFF
        assert not tracing.on


@pytest.mark.stack  # torch imported anew
def test_off_loads_nothing() -> None:
    program = (
        "import sys; import relaygr_stream.client, relaygr_stream.worker.process, relaygr_stream.trigger.service;"
        "sys.exit('opentelemetry' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


async def test_a_span_continues_the_trace_of_its_record_and_hands_it_on() -> None:
    async with tracing_of(ON, "worker", CollectorRegistry()) as tracing:
        trace = tracing.receive("relaygr.ranking", record(SAMPLED, ("tracestate", b"a=1"), ("other", b"x")))
        assert trace.recorded
        assert dict(trace.headers)["tracestate"] == b"a=1"
        given_trace, given_span, flags = of_headers([SAMPLED])
        assert of_headers(trace.headers)[0] == given_trace
        assert of_headers(trace.headers)[1] != given_span
        assert int(of_headers(trace.headers)[2], 16) & int(flags, 16) == 1
        inner = tracing.begin("inside", trace)
        assert of_headers(inner.headers)[0] == given_trace


@pytest.mark.parametrize(
    ("share", "sampler", "header", "recorded"),
    [
        (0.0, "", SAMPLED, True),
        (1.0, "", NOT_SAMPLED, False),
        (0.0, "", None, False),
        (1.0, "", None, True),
        (1.0, "always_off", SAMPLED, False),
        (0.0, "always_on", None, True),
        (0.0, "parentbased_always_on", NOT_SAMPLED, False),
    ],
)
async def test_the_caller_decides_then_the_variables_then_the_setting(
    monkeypatch: pytest.MonkeyPatch, share: float, sampler: str, header: tuple[str, bytes] | None, recorded: bool
) -> None:
    if sampler:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    async with tracing_of(Telemetry(traces=True, trace_share=share), "worker", CollectorRegistry()) as tracing:
        trace = tracing.receive("relaygr.ranking", record(*([header] if header else [])))
        assert trace.recorded == recorded
        assert int(of_headers(trace.headers)[2], 16) % 2 == recorded  # so that the next one knows


async def test_a_tenth_of_the_requests_is_traced() -> None:
    async with tracing_of(Telemetry(traces=True, trace_share=0.1), "client", CollectorRegistry()) as tracing:
        traced = sum(tracing.receive("relaygr.decide", record()).recorded for _ in range(2000))
    assert 120 < traced < 280  # 200, six standard deviations


@given(st.lists(st.tuples(st.sampled_from(["traceparent", "tracestate", "Traceparent", "x"]), st.binary(max_size=700))))
def test_no_header_breaks_anything(headers: list[tuple[str, bytes]]) -> None:
    tracing = Tracing(_provider())
    trace = tracing.receive("relaygr.ranking", record(*headers))
    trace.part("queue", 1.0, 2.0)
    trace.end()
    assert WRITTEN.fullmatch(dict(trace.headers)["traceparent"])
    for _, value in [*trace.headers, *trace_headers(headers)]:
        assert 0 < len(value) <= MAX_HEADER_BYTES


def _provider() -> object:
    from opentelemetry.sdk.trace import TracerProvider

    return TracerProvider(shutdown_on_exit=False)


@contextmanager
def hanging_collector() -> Iterator[str]:
    """Takes connections, and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def counted(registry: CollectorRegistry) -> dict[str, float]:
    return {
        result: registry.get_sample_value("relaygr_spans_total", {"result": result}) or 0.0
        for result in ("exported", "failed", "dropped")
    }


def ends(tracing: Tracing, spans: int) -> None:
    for _ in range(spans):
        tracing.begin("s", ()).end()


async def test_a_collector_that_hangs_costs_spans_and_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with hanging_collector() as endpoint:
        for name, value in {
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_EXPORTER_OTLP_TIMEOUT": "5",
            "OTEL_BSP_MAX_QUEUE_SIZE": "100",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "50",
        }.items():
            monkeypatch.setenv(name, value)
        registry = CollectorRegistry()
        async with tracing_of(Telemetry(traces=True, trace_share=1.0), "worker", registry) as tracing:
            ends(tracing, 1000)  # on this loop, which would wait five seconds for each batch
            await asyncio.sleep(0)
            assert counted(registry) == {"exported": 0, "failed": 0, "dropped": 900}


async def test_a_collector_that_is_away_costs_spans_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with receiver(tmp_path) as taps:
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
        # Where the collector is away, exports fail at once, with one retry at most. One that is late counts as failed.
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", taps.endpoint)
        taps.stop()
        registry = CollectorRegistry()
        async with tracing_of(Telemetry(traces=True, trace_share=1.0), "worker", registry) as tracing:
            ends(tracing, 7)
            await until(lambda: counted(registry)["failed"] == 7, "given up")
            taps.start()
            await until(taps.listens, "back")
            sent = 0

            def arrived() -> bool:
                nonlocal sent
                sent += 1
                ends(tracing, 1)
                return bool(taps.spans) and counted(registry)["exported"] > 0

            await until(arrived, "spans arrive")
            await until(lambda: sum(counted(registry).values()) >= 7 + sent, "each span is counted")
        assert sum(counted(registry).values()) == 7 + sent, "each span is counted once"


async def test_the_last_spans_of_a_process_arrive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with receiver(tmp_path) as taps:
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", taps.endpoint)
        async with tracing_of(Telemetry(traces=True, trace_share=1.0), "worker", CollectorRegistry()) as tracing:
            trace = tracing.receive("relaygr.ranking", record(SAMPLED))
            trace.fail(ValueError("no"))
        await until(lambda: taps.spans, "the span")
        (span,) = taps.spans
        assert (span.name, span.trace, span.error) == ("relaygr.ranking", of_headers([SAMPLED])[0], "no")
        assert span.attributes["messaging.kafka.offset"] == "17"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "OTEL_TRACES_EXPORTER = 'zipkin': telemetry.traces knows otlp, none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL = 'grpc'"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many", "OTEL_BSP_MAX_QUEUE_SIZE = 'many': write a whole number above 0"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-1", "OTEL_BSP_MAX_QUEUE_SIZE = '-1'"),
        ("OTEL_TRACES_SAMPLER", "all", "OTEL_TRACES_SAMPLER = 'all': telemetry.traces knows always_on, "),
        ("OTEL_TRACES_SAMPLER_ARG", "1.5", "OTEL_TRACES_SAMPLER_ARG = '1.5': write a share"),
        ("OTEL_TRACES_SAMPLER_ARG", "half", "OTEL_TRACES_SAMPLER_ARG = 'half': write a share"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/no/such", "OTEL_EXPORTER_OTLP_CERTIFICATE = '/no/such': no such file"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318", "OTEL_EXPORTER_OTLP_ENDPOINT = 'collector:4318': write http"),
    ],
)
async def test_a_variable_that_cannot_be_followed_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says):
        async with tracing_of(ON, "worker", CollectorRegistry()):
            pass


async def test_without_the_extra_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match="extra `otel`"):
        async with tracing_of(ON, "worker", CollectorRegistry()):
            pass
