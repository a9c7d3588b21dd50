"""A worker's spans, made from what the scheduler has answered: one for each ranking and each signal, with its parts.

    relaygr.ranking     fetch │ queue │ prefill │ score  from the record's read to the answer's acknowledgement
    relaygr.pre-infer   fetch │ queue │ prefill          from the record's read to the end of its prefill job

Runs on the event loop; the device thread makes no spans.
"""

from __future__ import annotations

from time import monotonic

from relaygr_stream.engine.commands import Answer, Placed, PrefillTask, RankTask
from relaygr_stream.telemetry.tracing import Trace
from relaygr_stream.wire.messages import MISSES
from relaygr_stream.wire.records import Record

#: Outcomes of rankings that waited for the device to compute prefix KV.
PREFILLED = MISSES | {"joined"}


class SignalOrigin:
    """Where a signal came from, if what becomes of it is told.

    trace: its span. read: when it was read, in seconds of time.monotonic(). record: its record, if it is done only when
    the signal is over.
    """

    __slots__ = ("read", "record", "trace")

    def __init__(self, trace: Trace | None, read: float, record: Record | None) -> None:
        self.trace = trace
        self.read = read
        self.record = record


def ranking_parts(trace: Trace, answer: Answer) -> None:
    """The parts of a ranking that is answered: what it waited for, and what the device did for it."""
    task, measured = answer.task, answer.measured
    if not trace.recorded or not measured.started:
        return
    done = measured.finished
    scoring = done - measured.score_ms / 1e3 if measured.score_ms else done
    begun = min(measured.started, scoring)
    trace.part("queue", max(task.arrived, trace.latest), begun)
    if measured.outcome in PREFILLED:
        trace.part("prefill", begun, scoring, {"relaygr.computed_tokens": measured.computed_tokens})
    if measured.score_ms:
        trace.part("score", scoring, done, {"relaygr.candidates": len(task.candidates)})


def fetch_part(task: RankTask | PrefillTask, started: float, behaviours: int) -> None:
    """The part in which the task's history was read from the store, or not; started: seconds of time.monotonic()."""
    trace = getattr(task.origin, "trace", None)
    if isinstance(trace, Trace):
        trace.part("fetch", started, monotonic(), {"relaygr.behaviours": behaviours})


def ranking_attributes(answer: Answer, worker: str) -> dict[str, str | int | float]:
    """What a ranking's span says of it."""
    task = answer.task
    return {
        "relaygr.request_id": task.request_id,
        "relaygr.worker": worker,
        "relaygr.prefix_tokens": len(task.tokens),
        "relaygr.candidates": len(task.candidates),
        "relaygr.hops": task.hops,
        "relaygr.device_ms": answer.measured.device_ms,
        "relaygr.inbound_ms": task.times.inbound_ms,
        **_scenario_of(task),
    }


def _scenario_of(task: RankTask | PrefillTask) -> dict[str, str]:
    """Where the worker serves several: the process's own attribute is its group's."""
    return {"relaygr.scenario": task.scenario} if task.scenario else {}


def signal_over(placed: Placed, worker: str) -> None:
    """End the span of a signal, if it has one."""
    task, origin = placed.task, placed.task.origin
    assert isinstance(origin, SignalOrigin)
    trace = origin.trace
    if trace is None:
        return
    if placed.started:
        trace.part("queue", max(origin.read, trace.latest), placed.started)
        trace.part("prefill", placed.started, placed.ended, {"relaygr.computed_tokens": placed.tokens})
    trace.end(
        {
            "relaygr.request_id": task.request_id,
            "relaygr.signal": placed.result,
            "relaygr.prefix_tokens": len(task.tokens),
            "relaygr.worker": worker,
            "relaygr.device_ms": placed.device_ms,
            "relaygr.completed": placed.completed,
            **_scenario_of(task),
        }
    )
