"""What a group of workers does, as the planner sees it: from the statuses of its workers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from relaygr_stream.ops.planner.seen import MOST_COUNT, VARIATION, GroupSeen, PartSeen, WorkerSeen, bounded
from relaygr_stream.ops.planner.utilisation import Work
from relaygr_stream.ops.status.overview import Overview, Seen
from relaygr_stream.ops.status.tally import KINDS, Tally, growth, lately, told_of
from relaygr_stream.wire.messages import WorkerStatus

#: Device time for prefixes and for scores, in a status's counters.
PREFIX_MS: Final = ("pre_infer_ms", "full_ms")
SCORE_MS: Final = "ranking_ms"
#: The squares of that for one prefix, and for one score.
PREFIX_MS2: Final = "prefix_ms2"
SCORE_MS2: Final = "ranking_ms2"
SQUARES: Final = (PREFIX_MS2, SCORE_MS2)
#: The counters of signals whose prefix KV are, or become, ready here.
READY: Final = tuple(f"signal_{result}" for result in ("computed", "extended", "hbm", "dram", "joined"))


def observed_reserve(view: Overview) -> GroupSeen:
    """The workers that stand by. view: of the fleet's own group."""
    return GroupSeen(workers=tuple(_worker(status) for _, status in sorted(view.living_reserve().items())))


def observed(view: Overview) -> GroupSeen:
    """The group's serving workers lately (ops/status/overview.py: LATELY_S)."""
    seen = [view.workers[name] for name, status in sorted(view.living_workers().items()) if status.state == "serving"]
    tally, per_second = lately(seen)
    spent, prefixes = defaultdict[str, float](float), 0.0
    workers = []
    for each in seen:
        grown = growth(each.last.counters, each.since.counters)
        own = Tally.between(each.since, each.last)
        # A worker that withholds its outcomes tells only for how much of the time its device works.
        told = SCORE_MS in each.last.counters
        seconds = (each.last.sent_ms - each.since.sent_ms) / 1e3
        for name in (*PREFIX_MS, *SQUARES):
            spent[name] += grown[name]
        spent[SCORE_MS] += grown[SCORE_MS] if told else each.last.busy_share * max(0.0, seconds) * 1e3
        prefixes += max(own.answers["ok"], sum(grown[name] for name in READY) + own.outcomes["full"])
        late = max(0, own.judged - own.within_slo)
        scored, busy = own.answers["ok"], each.last.busy_share
        workers.append(_worker(each.last, answers=own.all, late=late, scored=scored, busy=busy))
    if not all(PREFIX_MS2 in each.last.counters for each in seen):
        for name in SQUARES:
            spent.pop(name, None)
    prefix, score = works_of(spent, prefixes, tally.answers["ok"])
    return GroupSeen(
        workers=tuple(workers),
        per_second=bounded(per_second),
        prefix_ms=prefix.mean_ms,
        score_ms=score.mean_ms,
        prefix_variation=prefix.variation,
        score_variation=score.variation,
        p99_ms=tally.quantile_ms(0.99, *KINDS),
        parts=_parts(seen),
    )


def works_of(spent: Mapping[str, float], prefixes: float, scores: float) -> tuple[Work, Work]:
    """Device time of a request's prefix, and of its score. spent: by counter, for so many of them; without squares the
    variation is VARIATION."""
    prefix_ms = sum(spent[name] for name in PREFIX_MS)
    return _work(prefix_ms, spent.get(PREFIX_MS2), prefixes), _work(spent[SCORE_MS], spent.get(SCORE_MS2), scores)


def _work(total_ms: float, squares: float | None, count: float) -> Work:
    """By the sum of `count` times, and that of their squares."""
    known = squares is not None and total_ms > 0
    variation = count / total_ms * (squares or 0.0) / total_ms - 1 if known else VARIATION
    return Work(bounded(total_ms / count if count else 0.0), bounded(variation))


def _worker(status: WorkerStatus, answers: int = 0, late: int = 0, scored: int = 0, busy: float = 0.0) -> WorkerSeen:
    given_up = status.given_up or None
    return WorkerSeen(
        name=status.name,
        answers=min(answers, MOST_COUNT),
        late=min(late, MOST_COUNT),
        scored=min(scored, MOST_COUNT),
        busy=busy,
        lanes=len(status.lanes),
        epoch=status.assigned or 0,
        given_up=given_up.epoch if given_up else 0,
        why=given_up.reason if given_up else "",
    )


def _parts(seen: Sequence[Seen[WorkerStatus]]) -> dict[str, PartSeen]:
    """Of each scenario, where the group serves several."""
    names, spent = sorted({name for each in seen for name in each.last.scenarios or ()}), {}
    for name in names:
        grown = Counter[str]()
        for each in seen:
            grown += growth(told_of(each.last, name).counters, told_of(each.since, name).counters)
        spent[name] = sum(grown[key] for key in PREFIX_MS), grown[SCORE_MS]
    prefix_ms, score_ms = (max(1, sum(each[kind] for each in spent.values())) for kind in (0, 1))
    parts = {}
    for name, (prefix, score) in spent.items():
        tally, per_second = lately(seen, name)
        parts[name] = PartSeen(
            per_second=bounded(per_second),
            prefix_share=prefix / prefix_ms,
            score_share=score / score_ms,
            p99_ms=tally.quantile_ms(0.99, *KINDS),
        )
    return parts
