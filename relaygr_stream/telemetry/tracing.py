"""Traces: one span for each part of a request that a process does, linked by W3C trace context in records' headers.

Spans are made by OpenTelemetry (extra `otel`) on the event loop, which takes some 20 µs each; otlp.py exports them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

#: Headers of W3C Trace Context.
TRACE_HEADERS: Final = ("traceparent", "tracestate")
#: A longer header is not passed on: `traceparent` has 55 characters, `tracestate` is to be propagated up to 512.
MAX_HEADER_BYTES: Final = 512

Headers = Iterable[tuple[str, bytes | None]]
Attributes = Mapping[str, str | int | float | bool]
Kind = Literal["internal", "client", "producer", "consumer"]


def trace_headers(headers: Headers) -> list[tuple[str, bytes]]:
    """The trace context among a record's headers, to be passed on as it came; the first header of each name counts."""
    found: dict[str, bytes] = {}
    for name, value in headers:
        if name in TRACE_HEADERS and value and len(value) <= MAX_HEADER_BYTES:
            found.setdefault(name, value)
    return list(found.items())


class Received(Protocol):
    """A record as it was read from Kafka."""

    @property
    def topic(self) -> str: ...  # noqa: D102
    @property
    def lane(self) -> int: ...  # noqa: D102
    @property
    def offset(self) -> int: ...  # noqa: D102
    @property
    def headers(self) -> Sequence[tuple[str, bytes]]: ...  # noqa: D102


class Trace:
    """One span of this process, under way. recorded: it will be exported; else it only passes the context on."""

    __slots__ = ("_context", "_span", "_tracing", "headers", "latest", "recorded")

    def __init__(self, tracing: Tracing, span: Any, context: Any, headers: list[tuple[str, bytes]]) -> None:
        self._tracing = tracing
        self._span = span
        self._context = context
        self.headers: Final = headers  # for what this part of the request sends
        self.latest = 0.0  # end of its latest part
        self.recorded: Final = bool(span.get_span_context().trace_flags.sampled)

    @property
    def context(self) -> Any:
        """The OpenTelemetry context that has this span as its current one."""
        return self._context

    def part(self, name: str, start: float, end: float, attributes: Attributes | None = None) -> None:
        """A span inside this one, which is over. start, end: seconds of time.monotonic()."""
        if self.recorded and end >= start:
            self._tracing.finish(self._tracing.start(name, self._context, start, attributes), end)
            self.latest = end

    def describe(self, attributes: Attributes) -> None:
        """Add what is known meanwhile."""
        if self.recorded:
            self._span.set_attributes(attributes)

    def fail(self, error: BaseException) -> None:
        """It ended with this error."""
        self.end({"error.type": type(error).__name__}, error=str(error))

    def end(self, attributes: Attributes | None = None, *, error: str = "") -> None:
        """It is over, once; error: it failed, and why."""
        if self.recorded:
            self._span.set_attributes(attributes or {})
            if error:  # the text of a status
                self._span.set_status(self._tracing.api.Status(self._tracing.api.StatusCode.ERROR, error))
            self._tracing.finish(self._span, None)


class SpanRoom(Protocol):
    """Bounds the spans that wait for export; otlp.py's CountingExporter does."""

    def has_room(self) -> bool:
        """Whether one more span may wait; it is counted."""


class Tracing:
    """Makes this process's spans. Off (`on` is False), nothing may be asked of it, and nothing is loaded.

    provider: an OpenTelemetry TracerProvider; None: off. exporter: drops a span where too many wait for export.
    """

    def __init__(self, provider: Any = None, exporter: SpanRoom | None = None) -> None:
        self.on: Final = provider is not None
        self._exporter = exporter
        if provider is not None:
            from opentelemetry import trace  # noqa: PLC0415  (an extra)
            from opentelemetry.context import Context  # noqa: PLC0415
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

            self.api: Any = trace
            self._tracer = provider.get_tracer("relaygr_stream")
            self._propagator = TraceContextTextMapPropagator()
            self._nothing = Context()
            self._kinds = {
                kind: trace.SpanKind[kind.upper()] for kind in ("internal", "client", "producer", "consumer")
            }

    def begin(
        self,
        name: str,
        parent: Trace | Headers | None,
        *,
        kind: Kind = "internal",
        attributes: Attributes | None = None,
    ) -> Trace:
        """Start a span now. parent: another span, a record's headers, or None: the caller's current OpenTelemetry span.

        Where there is no parent, the sampler decides on a new trace.
        """
        if isinstance(parent, Trace):
            context = parent.context
        elif parent is not None:
            carried = {key: value.decode("ascii", "replace") for key, value in trace_headers(parent)}
            context = self._propagator.extract(carried, self._nothing) if carried else self._nothing
        else:
            context = None
        span = self.start(name, context, None, attributes, kind)
        inside = self.api.set_span_in_context(span, context)
        written: dict[str, str] = {}
        self._propagator.inject(written, inside)
        return Trace(self, span, inside, [(key, value.encode()) for key, value in written.items()])

    def receive(self, name: str, record: Received) -> Trace:
        """Start a span of the work at a record, inside the trace that its headers name."""
        attributes: dict[str, str | int] = {
            "messaging.system": "kafka",
            "messaging.destination.name": record.topic,
            "messaging.destination.partition.id": str(record.lane),
            "messaging.kafka.offset": record.offset,
        }
        return self.begin(name, record.headers, kind="consumer", attributes=attributes)

    def start(
        self, name: str, context: Any, start: float | None, attributes: Attributes | None, kind: Kind = "internal"
    ) -> Any:
        """An OpenTelemetry span. start: seconds of time.monotonic(); None: now."""
        return self._tracer.start_span(
            name, context, self._kinds[kind], attributes, start_time=None if start is None else unix_ns(start)
        )

    def finish(self, span: Any, end: float | None) -> None:
        """End a span, or drop it. end: seconds of time.monotonic(); None: now."""
        if span.get_span_context().trace_flags.sampled and (self._exporter is None or self._exporter.has_room()):
            span.end(None if end is None else unix_ns(end))


#: No tracing.
OFF: Final = Tracing()


def unix_ns(monotonic_s: float) -> int:
    """A time of time.monotonic() as Unix nanoseconds.

    Of three readings of both clocks the quickest counts: an interruption between the two would shift the time.
    """
    readings = []
    for _ in range(3):
        before, unix = time.monotonic_ns(), time.time_ns()
        readings.append((time.monotonic_ns() - before, unix - before))
    return min(readings)[1] + int(monotonic_s * 1e9)
