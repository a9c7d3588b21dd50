"""An OTLP receiver that is not ours, as a process: `oteltap`, which prints each span as a line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaygr_stream.ops.brokers.distribution import free_ports
from tests.waiting import WITHIN_S, until


@dataclass(frozen=True)
class Span:
    """A span, as it arrived."""

    name: str
    trace: str
    id: str
    parent: str  # empty: a root
    start: int  # Unix nanoseconds
    end: int
    error: str  # empty: none
    attributes: dict[str, Any]

    @classmethod
    def of(cls, line: str) -> Span:
        read = json.loads(line)
        values = {each["key"]: next(iter(each["value"].values())) for each in read["attributes"]}
        status = read["status"]
        return cls(
            read["name"],
            read["traceId"],
            read["spanId"],
            read["parentSpanId"],
            int(read["startTimeUnixNano"]),
            int(read["endTimeUnixNano"]),
            status["message"] if status["code"] else "",
            values,
        )


class Receiver:
    """A running receiver. endpoint: for OTEL_EXPORTER_OTLP_ENDPOINT."""

    def __init__(self, output: Path) -> None:
        (port,) = free_ports(1)
        self.endpoint = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-u", "-m", "oteltap", "--port", str(port)]
        self._output = output
        self.start()

    def start(self) -> None:
        """Start it, after `stop` anew: without what had arrived."""
        with self._output.open("wb") as file:
            self._process = subprocess.Popen(self._command, stdout=file, stderr=subprocess.STDOUT)

    @property
    def spans(self) -> list[Span]:
        """What has arrived, in that order."""
        lines = self._output.read_text(encoding="utf-8").split("\n")[:-1]
        return [Span.of(line) for line in lines if line.startswith('{"traceId"')]

    def listens(self) -> bool:
        """Whether it takes spans."""
        assert self._process.poll() is None, self._output.read_text(encoding="utf-8")
        return "Listening" in self._output.read_text(encoding="utf-8")

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(WITHIN_S)


@asynccontextmanager
async def receiver(folder: Path) -> AsyncIterator[Receiver]:
    """A receiver that listens."""
    running = Receiver(folder / "spans.ndjson")
    try:
        await until(running.listens, "the receiver listens")
        yield running
    finally:
        running.stop()
