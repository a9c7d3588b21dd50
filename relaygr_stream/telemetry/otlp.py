"""Exports spans by OTLP, on a thread of the OpenTelemetry SDK (extra `otel`), as the variables OTEL_… say.

The event loop only appends to a bounded queue. Where the collector is slow or away, spans are lost and counted, and
nothing else happens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry, Counter

from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.schema import Telemetry
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.telemetry.tracing import OFF, Tracing

log = structlog.get_logger(__name__)
limited = LogLimiter().limited

#: Time to export what is left when a process ends. A collector that answers takes milliseconds.
CLOSE_S: Final = 2.0
#: Spans that may wait for export: of OTEL_BSP_MAX_QUEUE_SIZE, as OpenTelemetry specifies it.
QUEUE_SPANS: Final = 2048
SAMPLER: Final = "OTEL_TRACES_SAMPLER"
SAMPLER_ARG: Final = "OTEL_TRACES_SAMPLER_ARG"
#: As OpenTelemetry specifies them.
SAMPLERS: Final = (
    *("always_on", "always_off", "traceidratio"),
    *("parentbased_always_on", "parentbased_always_off", "parentbased_traceidratio"),
)
_NUMBER: Final = re.compile(r"\d*\.?\d+(e-?\d+)?")
_COUNT: Final = re.compile(r"0*[1-9]\d*")


class SpanCounts:
    """How many spans were exported and lost."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.spans = Counter(
            "relaygr_spans",
            "Spans by what became of them: exported, failed (the collector did not take them), dropped (the queue "
            "was full); with telemetry.traces.",
            ["result"],
            registry=registry,
        )
        for result in ("exported", "failed", "dropped"):
            self.spans.labels(result)


class CountingExporter:
    """An exporter of OpenTelemetry spans that counts what becomes of them. most: spans that may wait for export.

    One thread calls `has_room`, the SDK's thread calls `export`.
    """

    def __init__(self, exporter: Any, spans: Counter, most: int) -> None:
        self._exporter = exporter
        self._spans = spans
        self._most = most
        self._ended = 0
        self._over = 0  # exported or failed

    def has_room(self) -> bool:
        """Whether one more span may wait; it is counted."""
        if self._ended - self._over >= self._most:
            self._spans.labels("dropped").inc()
            return False
        self._ended += 1
        return True

    def export(self, spans: Sequence[Any]) -> Any:
        """Export a batch; returns the SDK's result."""
        from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: PLC0415  (an extra)

        try:
            result = self._exporter.export(spans)
        except Exception as error:  # an exporter of any kind: spans are lost, the process goes on
            result = SpanExportResult.FAILURE
            limited(log.warning, "spans")("spans not exported", spans=len(spans), error=str(error))
        else:
            if result is not SpanExportResult.SUCCESS:
                limited(log.warning, "spans")("spans not exported: the collector did not take them", spans=len(spans))
        self._spans.labels("exported" if result is SpanExportResult.SUCCESS else "failed").inc(len(spans))
        self._over += len(spans)
        return result

    def force_flush(self, timeout_millis: int = 30000) -> bool:  # noqa: ARG002  (the SDK's signature)
        """Nothing waits here."""
        return True

    def shutdown(self) -> None:
        """Close the connection to the collector, and end retries."""
        self._exporter.shutdown()


@asynccontextmanager
async def tracing_of(
    settings: Telemetry, process: str, registry: CollectorRegistry, scenario: str = ""
) -> AsyncIterator[Tracing]:
    """Tracing as configured, OFF by default; at the end, what is left is exported within CLOSE_S.

    process: the service's name is `relaygr-PROCESS`, if OTEL_SERVICE_NAME says nothing else. scenario: that the process
    serves; an attribute of its resource.
    Raises ConfigError: the extra is not installed, or a variable of OpenTelemetry asks for what there is not.
    """
    if not settings.traces or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        yield OFF
        return
    provider, tracing = _made(settings, process, scenario, SpanCounts(registry))
    try:
        yield tracing
    finally:
        await _shut_down(provider)


def _made(settings: Telemetry, process: str, scenario: str, counts: SpanCounts) -> tuple[Any, Tracing]:
    """A TracerProvider of the SDK, and the Tracing that uses it."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415  (an extra)
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"telemetry.traces needs this package's extra `otel`; install it ({error})") from error
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # CountingExporter says it, within limits
    try:
        _refuse_unusable()
        # None: as OTEL_TRACES_SAMPLER says.
        sampler = None if os.environ.get(SAMPLER) else ParentBased(TraceIdRatioBased(settings.trace_share))
        provider = TracerProvider(sampler, _resource(process, scenario), shutdown_on_exit=False)
        if _variable(("OTEL_TRACES_EXPORTER",), ("otlp", "none")) == "none":
            return provider, Tracing(provider)
        _variable(("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"), ("http/protobuf",))
        most = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or QUEUE_SPANS)
        exporter = CountingExporter(OTLPSpanExporter(), counts.spans, most)
        provider.add_span_processor(BatchSpanProcessor(exporter, most))
    except ValueError as error:
        raise ConfigError(f"telemetry.traces: a variable OTEL_… has a bad value: {error}") from error
    return provider, Tracing(provider, exporter)


def _refuse_unusable() -> None:
    """Raise ConfigError for a variable that the SDK would pass over, or fail by without its name."""
    ours = (SAMPLER, SAMPLER_ARG, "OTEL_BSP_", "OTEL_EXPORTER_OTLP_")
    for name, value in ((name, value) for name, value in os.environ.items() if value and name.startswith(ours)):
        if name == SAMPLER:
            _variable((SAMPLER,), SAMPLERS)
        elif name == SAMPLER_ARG and not (_NUMBER.fullmatch(value) and float(value) <= 1):
            raise ConfigError(f"{name} = {value!r}: write a share from 0 to 1")
        elif name.startswith("OTEL_BSP_") and not _COUNT.fullmatch(value):
            raise ConfigError(f"{name} = {value!r}: write a whole number above 0")
        elif name.endswith("_CERTIFICATE") and not Path(value).is_file():
            raise ConfigError(f"{name} = {value!r}: no such file")
        elif name.endswith("_ENDPOINT") and not value.startswith(("http://", "https://")):
            raise ConfigError(f"{name} = {value!r}: write http://HOST:PORT, or https://…")


def _resource(process: str, scenario: str) -> Any:
    """What the spans are of. OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME go before."""
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  (an extra)

    about = {"service.name": f"relaygr-{process}", "service.instance.id": f"{socket.gethostname()}-{os.getpid()}"}
    ours = Resource({**about, "relaygr.scenario": scenario} if scenario else about)
    stated = Resource.create()
    if stated.attributes.get("service.name", "").startswith("unknown_service"):  # nothing is stated
        return stated.merge(ours)
    return ours.merge(stated)


def _variable(names: Sequence[str], known: Sequence[str]) -> str:
    """The value of the first of these variables that is set, or the first known one. Raises ConfigError for another."""
    for name in names:
        if value := os.environ.get(name):
            if value not in known:
                raise ConfigError(f"{name} = {value!r}: telemetry.traces knows {', '.join(known)}")
            return value
    return known[0]


async def _shut_down(provider: Any) -> None:
    """Export what is left, on a thread that does not hold up the end of the process."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def work() -> None:
        provider.shutdown()
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(over.set)

    threading.Thread(target=work, name="spans", daemon=True).start()
    try:
        async with asyncio.timeout(CLOSE_S):
            await over.wait()
    except TimeoutError:
        log.warning("the collector is slow or away; the last spans are lost", after_s=CLOSE_S)
