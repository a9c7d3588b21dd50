"""A worker's requests without a worker around them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry

from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.history.store import HistoryStore
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.tracing import OFF
from relaygr_stream.wire.records import RecordReader
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.worker.context import WorkerConnections, WorkerContext
from relaygr_stream.worker.core import WorkerCore, WorkerPolicy
from relaygr_stream.worker.device import Device
from relaygr_stream.worker.metrics import WorkerMetrics
from relaygr_stream.worker.requests import Requests
from tests.done import DoneRecords


class Made(NamedTuple):
    """Requests with their real core, between producers and a device that the test gives."""

    requests: Requests
    core: WorkerCore
    background: Background
    registry: CollectorRegistry


def made_requests(
    settings: Settings,
    topics: TopicSet,
    producers: tuple[Any, Any],
    device: Any,
    model: Any,
    *,
    name: str = "w1",
    peers: OwnerDirectory | None = None,
    store: HistoryStore | None = None,
    reader: RecordReader | None = None,
) -> Made:
    """producers: of scores, and of all else."""
    registry, background = CollectorRegistry(), Background()
    context = WorkerContext(settings, name, WorkerMetrics(registry), registry, OFF, background)
    connections = WorkerConnections(topics, *producers, None, store)  # type: ignore[arg-type]
    core = WorkerCore(name, WorkerPolicy.from_settings(settings), peers or OwnerDirectory(60_000.0), topics)
    parts = Device(device, SimpleNamespace(model=model))  # type: ignore[arg-type]
    requests = Requests(context, connections, parts, core, DoneRecords() if reader is None else reader)
    return Made(requests, core, background, registry)
