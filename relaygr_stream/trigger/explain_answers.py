"""What became of the rankings of a live sample (trigger/explain.py), and whether that was overload's doing."""

from __future__ import annotations

from typing import Final, NamedTuple

from relaygr_stream.errors import DecodeError
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.ops.status.overload import REFUSED, is_busy
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import Outcome, ScoreReply
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import TopicSet

#: The answer to a ranking whose scores came after the SLO, and to one that was cut to its newest behaviours.
LATE = "late"
TRUNCATED: Final[Outcome] = "truncated"


class SampledAnswer(NamedTuple):
    """answer: a ranking's status, or TRUNCATED. busy: its worker's device has no time; None: not known whose. ms: on
    the worker, from reading the ranking."""

    answer: str
    busy: bool | None
    ms: float


class SampledAnswers:
    """Of each request's answers, and its copies', the best: the first with scores. They name no tenant."""

    def __init__(self, topics: TopicSet, directory: OwnerDirectory) -> None:
        self._most_bytes = topics.scores.max_message_bytes
        self._directory = directory
        self._found: dict[str, SampledAnswer] = {}

    def on_records(self, records: list[Record]) -> None:
        """Handle records of `scores`."""
        for record in records:
            try:
                reply = decode(ScoreReply, record.value, self._most_bytes)
            except DecodeError:
                continue
            known = self._found.get(reply.request_id)
            if known is None or known.answer not in ("ok", TRUNCATED):
                answer = TRUNCATED if reply.outcome == TRUNCATED else reply.status
                busy, ms = self._busy(reply.worker), reply.timings.worker_ms
                self._found[reply.request_id] = SampledAnswer(answer, busy, ms)

    def answer_to(self, request_id: str, owner: str | None, slo_ms: float) -> tuple[str | None, bool]:
        """The answer to a request, None if none was seen, and whether it is overload's doing.

        owner: of its lane, which counts where the answer does not tell its worker (worker.withhold_outcomes).
        """
        found = self._found.get(request_id)
        if found is None:
            return None, False
        busy = self._busy(owner or "") if found.busy is None else found.busy
        answer = LATE if found.answer in ("ok", TRUNCATED) and found.ms > slo_ms else found.answer
        missed = answer in (LATE, TRUNCATED, *REFUSED)  # there was no time for it, or for all of it, or no place
        return answer, missed and bool(busy)

    def _busy(self, worker: str) -> bool | None:
        known = self._directory.lanes_of(worker)
        return None if known is None else is_busy(known[0])
