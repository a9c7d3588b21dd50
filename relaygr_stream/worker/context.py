"""What the parts of one worker process share."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from relaygr_stream.bus.ages import LogEnds
from relaygr_stream.bus.producer import Producer
from relaygr_stream.groups.moves import GroupMoves
from relaygr_stream.history.store import HistoryStore
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.tracing import Tracing
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.worker.metrics import WorkerMetrics


@dataclass(frozen=True)
class WorkerContext:
    """Who the worker is, and where its parts report. background: runs their tasks, and learns of defects in them.

    moves: which scenario it serves, and by which epoch.
    """

    settings: Settings
    name: str
    metrics: WorkerMetrics
    registry: CollectorRegistry
    tracing: Tracing
    background: Background
    moves: GroupMoves = field(default_factory=GroupMoves)


@dataclass(frozen=True)
class WorkerConnections:
    """scores: for answers, acknowledged by one broker; others: for all else, by all in sync. store: of histories; None:
    none is set."""

    topics: TopicSet
    scores: Producer
    others: Producer
    ends: LogEnds
    store: HistoryStore | None = None
