"""The six invariants of DESIGN §9, from what was seen of a run. Knows nothing of Kafka nor of processes: witness.py
sees, this judges.

1  every request has one accepted answer or one typed error     4  bytes within budget, no pins leaked
2  relayed scores = full inference                              5  committed offset ≤ contiguous done
3  an answer is of its own user, model and sequence             6  every bad message is in the dead-letter topic
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from relaygr_stream import errors
from relaygr_stream.client import Ranking
from relaygr_stream.messages import WorkerStatus
from relaygr_stream.workload.driver import Result
from relaygr_stream.workload.items import WorkItem

#: DESIGN §8, float32.
TOLERANCE: Final = 1e-5
#: Errors with which a request may end: it has its answer, "no scores, and why".
TYPED: Final = frozenset(
    kind.__name__
    for kind in (
        errors.DeadlineExceeded,
        errors.Overloaded,
        errors.WorkerFailed,
        errors.BrokerUnavailable,
        errors.BrokerError,
    )
)
#: Of those, the ones for which nobody heard of an answer.
UNHEARD: Final = frozenset({"DeadlineExceeded", "BrokerUnavailable", "BrokerError"})
#: Examples named in a complaint.
SHOWN: Final = 5

Place: TypeAlias = tuple[str, int, int]  # topic, partition, offset


@dataclass
class Ledger:
    """What was sent, answered, buried and committed.

    model_version: of the model whose full inference is the truth. pinned_bytes: most that a worker may have pinned.
    answers_may_be_lost: brokers die in this run, so an answer that its worker has sent (`scores` has acks = 1) may be
    lost on its way, or given up after the retries of worker/outbox.py; its client must then have ended typed.
    """

    model_version: str
    pinned_bytes: int
    answers_may_be_lost: bool = False
    sent: Counter[str] = field(default_factory=Counter)  # request id → times
    ends: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # → "scores" or the error
    deviations: dict[str, float] = field(default_factory=dict)  # of answers with scores, from full inference
    strangers: list[str] = field(default_factory=list)  # answers that are not of their request
    rankings: dict[Place, tuple[bytes, str]] = field(default_factory=dict)  # → correlation id, request id
    replied: set[bytes] = field(default_factory=set)  # correlation ids seen on `scores`
    letters: defaultdict[Place, list[str]] = field(default_factory=lambda: defaultdict(list))  # origin → reasons
    bad: dict[Place, str] = field(default_factory=dict)  # bad messages sent → the reason that they deserve
    committed: dict[tuple[str, int], int] = field(default_factory=dict)
    log_ends: dict[tuple[str, int], int] = field(default_factory=dict)
    over_budget: list[str] = field(default_factory=list)
    worst_audit: float = 0.0  # largest deviation that a worker found by itself
    pinned_at_rest: dict[str, int] = field(default_factory=dict)  # worker → bytes after the last life window
    exits: list[tuple[str, int, int]] = field(default_factory=list)  # process, its exit code, the one it should have
    lost_answers: int = 0  # excused: see answers_may_be_lost

    # ---- what is seen ----

    def sending(self, items: Iterable[WorkItem]) -> Iterator[WorkItem]:
        """The same items, each noted once its turn has come. To stop a drive, end the items: with the driver's own
        `stop` the last one would be noted and not sent."""
        for item in items:
            self.sent[item.request.request_id] += 1
            yield item

    def result(self, result: Result) -> None:
        """A request has ended."""
        request = result.item.request.request_id
        self.ends[request].append(result.error or "scores")
        if (ranking := result.ranking) is None:
            return
        if isinstance(ranking, Ranking) and ranking.request_id != request:
            self.strangers.append(f"{request} got the answer to {ranking.request_id}")
        if ranking.model_version != self.model_version:
            self.strangers.append(f"{request} was scored by model {ranking.model_version}, not {self.model_version}")

    def status(self, status: WorkerStatus) -> None:
        """A worker has stated itself."""
        pinned = sum(lane.pinned_bytes for lane in status.lanes)
        granted = sum(lane.budget_bytes for lane in status.lanes)
        for what, used, most in (
            ("HBM", status.hbm_used_bytes, status.hbm_bytes),
            ("DRAM", status.dram_used_bytes, status.dram_bytes),
            ("pinned", pinned, self.pinned_bytes),
            ("granted to triggers", granted, self.pinned_bytes),
        ):
            if used > most:
                self.over_budget.append(f"{status.name}: {used} bytes {what}, the budget is {most}")
        self.worst_audit = max(self.worst_audit, status.counters.get("audit_deviation", 0.0))

    # ---- the judgement ----

    def complaints(self) -> list[str]:
        """What is wrong, in words; empty if all six invariants hold."""
        return [
            *self._one_end_each(),
            *self._full_scores(),
            *_named("answers of another request or model", self.strangers),
            *self._budgets(),
            *self._commits(),
            *self._burials(),
            *_named("processes that ended otherwise than they should", [
                f"{name} with {code}, not {due}" for name, code, due in self.exits if code != due
            ]),
        ]  # fmt: skip

    def check(self) -> None:
        """Raise AssertionError naming everything that is wrong."""
        if complaints := self.complaints():
            raise AssertionError("\n".join(complaints))

    @property
    def lost(self) -> list[str]:
        """Requests that ended neither with scores nor with a typed error."""
        return [request for request in self.sent if not self.ends.get(request)]

    @property
    def wrong(self) -> list[str]:
        """Requests whose scores are not those of full inference."""
        return [request for request, deviation in self.deviations.items() if not deviation <= TOLERANCE]

    @property
    def skipped(self) -> list[str]:
        """Ranking records below the committed offset that nobody answered or buried: promised, and not done."""
        skipped, self.lost_answers = [], 0
        for (topic, lane, offset), (correlation, request) in self.rankings.items():
            if offset >= self.committed.get((topic, lane), 0) or correlation in self.replied:
                continue
            if (topic, lane, offset) in self.letters or "scores" in self.ends.get(request, ()):
                continue
            if self.answers_may_be_lost and UNHEARD.intersection(self.ends.get(request, ())):
                self.lost_answers += 1
                continue
            skipped.append(f"{request} at {topic}[{lane}] {offset}")
        return skipped

    def _one_end_each(self) -> Iterator[str]:
        yield from _named("requests lost: no scores, no typed error", self.lost)
        yield from _named("requests sent twice under one id", [key for key, times in self.sent.items() if times > 1])
        yield from _named("requests with several ends", [
            f"{key}: {ends}" for key, ends in self.ends.items() if len(ends) > 1
        ])  # fmt: skip
        yield from _named("ends of requests that nobody sent", [key for key in self.ends if key not in self.sent])
        yield from _named("requests that ended with an error they cannot have", [
            f"{key}: {ends}" for key, ends in self.ends.items() if not {*ends} <= {*TYPED, "scores"}
        ])  # fmt: skip

    def _full_scores(self) -> Iterator[str]:
        yield from _named(
            f"scores further than {TOLERANCE:g} from full inference",
            [f"{key} by {self.deviations[key]:.2g}" for key in self.wrong],
        )
        uncompared = [key for key, ends in self.ends.items() if "scores" in ends and key not in self.deviations]
        yield from _named("scores that nobody compared with full inference", uncompared)
        if self.worst_audit > TOLERANCE:
            yield f"a worker's own audit found scores {self.worst_audit:.2g} from full inference"

    def _budgets(self) -> Iterator[str]:
        yield from _named("budgets exceeded", self.over_budget)
        yield from _named("pins leaked", [
            f"{worker} has {held} bytes pinned for nobody" for worker, held in self.pinned_at_rest.items() if held
        ])  # fmt: skip

    def _commits(self) -> Iterator[str]:
        yield from _named("records committed and not done", self.skipped)
        yield from _named("lanes that stand still: the log goes on, the committed offset does not", [
            f"{key}: {self.committed.get(key, 0)} of {end}"
            for key, end in self.log_ends.items() if self.committed.get(key, 0) < end
        ])  # fmt: skip

    def _burials(self) -> Iterator[str]:
        yield from _named("bad messages without their dead letter", [
            f"{reason} at {place}, buried as {self.letters.get(place, 'nothing')}"
            for place, reason in self.bad.items() if reason not in self.letters.get(place, ())
        ])  # fmt: skip
        yield from _named("good messages among the dead letters", [
            f"{reasons} at {place}" for place, reasons in self.letters.items() if place not in self.bad
        ])  # fmt: skip


def _named(what: str, found: list[str]) -> Iterator[str]:
    """One line for all of a kind."""
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        yield f"{len(found)} {what}: {'; '.join(found[:SHOWN])}{more}"
