"""Six invariants of a fleet under faults, from what was seen of a run. Knows no Kafka and no processes: witness.py
sees, this judges.

1  every request has one accepted answer or one typed error     4  bytes within budget, no pins leaked
2  relayed scores = full inference                              5  committed offset ≤ contiguous done
3  an answer is of its own user, model and sequence             6  every bad message is in the dead-letter topic
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from relaygr_stream import errors
from relaygr_stream.client import Ranking
from relaygr_stream.wire.messages import WorkerStatus
from relaygr_stream.workload.driver import Result
from relaygr_stream.workload.items import WorkItem

#: The exactness bound in float32.
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
#: An answer may go with a broker that dies this long after its request was sent: a request has 3 s, and a lane whose
#: owner has gone finds the next one within the session timeout of 3 s.
ANSWERED_WITHIN_S: Final = 6.0
#: Examples named in a complaint.
SHOWN: Final = 5

Place: TypeAlias = tuple[str, int, int]  # topic, partition, offset


@dataclass(frozen=True)
class Copy:
    """One record on `ranking`. A request has several where its client hedges, each with a correlation id of its own."""

    correlation: bytes
    request: str
    sent_s: float = 0.0  # Unix time at which it was produced
    hops: int = 0  # 1 or more: a hedge, or a forward, which takes the place of the copy that it was made of


@dataclass
class Ledger:
    """What was sent, answered, dead-lettered and committed.

    model_version: of the model whose full inference is the truth. pinned_bytes: most that a worker may have pinned.
    absences: from when to when (Unix time) a broker was dead or out of everybody's reach. An answer that its worker
    sent then (`scores` has acks = 1) may be lost with it, or given up after the retries of worker/replies.py.
    """

    model_version: str
    pinned_bytes: int
    absences: list[tuple[float, float]] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)  # request id → times
    ends: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # → "scores" or the error
    deviations: dict[str, float] = field(default_factory=dict)  # of answers with scores, from full inference
    strangers: list[str] = field(default_factory=list)  # answers that are not of their request
    rankings: dict[Place, Copy] = field(default_factory=dict)
    from_clients: set[Place] = field(default_factory=set)  # of those, the ones that are no forwards
    replied: Counter[bytes] = field(default_factory=Counter)  # correlation id → answers seen on `scores`
    letters: defaultdict[Place, list[str]] = field(default_factory=lambda: defaultdict(list))  # origin → reasons
    bad: dict[Place, str] = field(default_factory=dict)  # bad messages sent → the reason that they deserve
    committed: dict[tuple[str, int], int] = field(default_factory=dict)
    log_ends: dict[tuple[str, int], int] = field(default_factory=dict)
    over_budget: list[str] = field(default_factory=list)
    worst_audit: float = 0.0  # largest deviation that a worker found by itself
    pinned_at_rest: dict[str, int] = field(default_factory=dict)  # worker → bytes after the last life window
    exits: list[tuple[str, int, int]] = field(default_factory=list)  # process, its exit code, the one it should have
    lost_answers: int = 0  # excused: see absences

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
        """Requests without an end, and copies on `ranking` that nobody answered or dead-lettered, committed or not."""
        return [*self._endless, *self._unanswered(self.rankings)]

    @property
    def wrong(self) -> list[str]:
        """Requests whose scores are not those of full inference."""
        return [request for request, deviation in self.deviations.items() if not deviation <= TOLERANCE]

    @property
    def skipped(self) -> list[str]:
        """Ranking records below the committed offset that nobody answered or dead-lettered: promised, and not done."""
        return self.skipped_on(self.committed)

    def skipped_on(self, lanes: Collection[tuple[str, int]]) -> list[str]:
        """As `skipped`, of these lanes alone."""
        return self._unanswered(
            place for place in self.rankings if place[:2] in lanes and place[2] < self.committed.get(place[:2], 0)
        )

    @property
    def _endless(self) -> list[str]:
        return [request for request in self.sent if not self.ends.get(request)]

    def _unanswered(self, places: Iterable[Place]) -> list[str]:
        """Each copy has its own answer, whatever became of the others: one that was scored excuses none. Only a
        broker's absence does."""
        owed: defaultdict[bytes, list[Place]] = defaultdict(list)
        for place in places:
            copy = self.rankings[place]
            if place not in self.letters and (not copy.hops or place in self.from_clients):
                owed[copy.correlation].append(place)
        unanswered, self.lost_answers = list[str](), 0
        for correlation, copies in owed.items():
            missing = len(copies) - self.replied[correlation]
            # Which of them has no answer, nobody knows: one that a broker may have lost, if there is such a one.
            copies.sort(key=lambda place: not self._may_be_lost(self.rankings[place]))
            for place in copies[: max(0, missing)]:
                if self._may_be_lost(self.rankings[place]):
                    self.lost_answers += 1
                else:
                    topic, lane, offset = place
                    unanswered.append(f"{self.rankings[place].request} at {topic}[{lane}] {offset}")
        return unanswered

    def _may_be_lost(self, copy: Copy) -> bool:
        """Whether its answer may have gone with a broker; its client must have been told something all the same."""
        near = any(start - ANSWERED_WITHIN_S <= copy.sent_s <= end for start, end in self.absences)
        return near and bool(self.ends.get(copy.request))

    def _one_end_each(self) -> Iterator[str]:
        yield from _named("requests lost: no scores, no typed error", self._endless)
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
            f"{reason} at {place}, dead-lettered as {self.letters.get(place, 'nothing')}"
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
