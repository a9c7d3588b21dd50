"""What all lanes of a trigger share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from relaygr_stream.bus.dead_letter import DeadLetters
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.records import Record
from relaygr_stream.owners import OwnerDirectory
from relaygr_stream.topics import TopicSet
from relaygr_stream.trigger.decision import Policy
from relaygr_stream.trigger.load import OwnerLoads
from relaygr_stream.trigger.log_ends import LogEnds, SenderLag
from relaygr_stream.trigger.metrics import TriggerMetrics
from relaygr_stream.trigger.refused import Refused


@dataclass(frozen=True)
class Surroundings:
    """The parts that a lane's trigger works with."""

    policy: Policy
    topics: TopicSet
    owners: OwnerDirectory
    producer: Producer
    letters: DeadLetters
    ends: LogEnds
    metrics: TriggerMetrics
    done: Callable[[Record], None]
    refused: Refused
    # Until it knows more, a trigger believes: what waited while there was none is old, and a fresh event that a clock
    # makes stale costs a pre-inference. A worker does not: there it would cost the answer.
    lag: SenderLag = field(default_factory=partial(SenderLag, 0.0))
    loads: OwnerLoads = field(default_factory=OwnerLoads)
    log_decisions: bool = False  # a log line per decision costs more than the decision, even one that is dropped
