"""What workers answered between two of their statuses: how much, how quickly, from where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from relaygr_stream.ops.status.overview import Seen
from relaygr_stream.wire.latencies import Counts, quantile_s, since, total
from relaygr_stream.wire.messages import HITS, ScenarioTotals, WorkerStatus
from relaygr_stream.wire.worker_status import WITHIN_SLO

#: Outcomes of rankings that found prefix KV, and of those that did not.
RELAY: Final = "relay"
FULL: Final = "full"
KINDS: Final[dict[str, tuple[str, ...]]] = {RELAY: HITS, FULL: ("full", "truncated")}

#: Of a scenario of which a status does not tell.
NOTHING: Final = ScenarioTotals()

#: A float has every whole number up to here.
MOST: Final = 2**53


@dataclass
class Tally:
    """Counts of answers, of one worker or of several."""

    answers: Counter[str] = field(default_factory=Counter)  # by status
    outcomes: Counter[str] = field(default_factory=Counter)  # of those with scores: where the prefix KV was found
    latencies: dict[str, Counts] = field(default_factory=dict)  # as WorkerStatus.latencies
    within_slo: int = 0
    judged: int = 0  # answers of workers that tell how many were within the SLO

    @classmethod
    def between(cls, before: WorkerStatus | ScenarioTotals | None, now: WorkerStatus | ScenarioTotals) -> Self:
        """What a worker answered between two statuses of one incarnation; before: None for its start."""
        earlier = before.counters if before is not None else {}
        of = before.latencies or {} if before is not None else {}
        answers = growth(now.counters, earlier, "answers_")
        return cls(
            answers,
            growth(now.counters, earlier, "outcome_"),
            {outcome: since(counts, of.get(outcome, ())) for outcome, counts in (now.latencies or {}).items()},
            growth(now.counters, earlier, WITHIN_SLO).total(),
            answers.total() if WITHIN_SLO in now.counters else 0,
        )

    def add(self, other: Tally) -> None:
        """Count another worker's, or another time's, too."""
        self.answers.update(other.answers)
        self.outcomes.update(other.outcomes)
        for outcome, counts in other.latencies.items():
            self.latencies[outcome] = total((self.latencies.get(outcome, ()), counts))
        self.within_slo += other.within_slo
        self.judged += other.judged

    @property
    def all(self) -> int:
        """Answers, with scores and without."""
        return self.answers.total()

    @property
    def errors(self) -> int:
        """Answers without scores."""
        return self.all - self.answers["ok"]

    @property
    def late(self) -> int:
        """Answers with scores later than relay.slo_ms; 0 if the workers do not tell."""
        return max(0, self.judged - self.within_slo - self.errors) if self.judged else 0

    def refused(self) -> dict[str, int]:
        """Answers without scores by status, the most frequent first."""
        return {status: count for status, count in self.answers.most_common() if status != "ok" and count}

    def quantile_ms(self, share: float, *kinds: str) -> float | None:
        """Milliseconds from reading a ranking to its reply; None: no such ranking, or the workers do not tell.

        kinds: RELAY, FULL.
        """
        found = quantile_s(total(self.latencies.get(each, ()) for kind in kinds for each in KINDS[kind]), share)
        return None if found is None else found * 1e3

    def hit_rate(self) -> float | None:
        """Share of scored rankings that found prefix KV; None: there were none."""
        hits = sum(self.outcomes[name] for name in HITS)
        scored = hits + sum(self.outcomes[name] for name in KINDS[FULL])
        return hits / scored if scored else None

    def slo_share(self) -> float | None:
        """Share of answers that had scores within relay.slo_ms of being read; None: there were none, or unknown."""
        return self.within_slo / self.judged if self.judged else None


def told_of(status: WorkerStatus, scenario: str) -> WorkerStatus | ScenarioTotals:
    """What the status tells of a scenario; of all where its group serves one at most, or for ""."""
    return status.scenarios.get(scenario, NOTHING) if scenario and status.scenarios else status


def lately(seen: Iterable[Seen[WorkerStatus]], scenario: str = "") -> tuple[Tally, float]:
    """What these workers answered lately, and the rate of all their answers a second; of a scenario, as told_of."""
    whole, rate = Tally(), 0.0
    for worker in seen:
        tally = Tally.between(told_of(worker.since, scenario), told_of(worker.last, scenario))
        seconds = (worker.last.sent_ms - worker.since.sent_ms) / 1e3
        whole.add(tally)
        rate += tally.all / seconds if seconds > 0 else 0.0
    return whole, rate


def growth(now: Mapping[str, float], before: Mapping[str, float], prefix: str = "") -> Counter[str]:
    """By how much running counts with this prefix have grown, by their names without it. What a process started anew
    counts is no growth, and what no process can count is MOST: statuses are foreign."""
    cut = len(prefix)
    return Counter(
        {
            name[cut:]: int(min(max(0.0, total - before.get(name, 0.0)), MOST))
            for name, total in now.items()
            if name.startswith(prefix)
        }
    )
