"""What a group of workers does, as the planner sees it: from the statuses of its workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from relaygr_stream.ops.planner.seen import VARIATION, GroupSeen, PartSeen, WorkerSeen
from relaygr_stream.ops.status.overview import Overview, Seen
from relaygr_stream.ops.status.tally import KINDS, Tally, growth, lately, told_of
from relaygr_stream.wire.messages import WorkerStatus

#: Device time for prefixes and for scores, in a status's counters.
PREFIX_MS: Final = ("pre_infer_ms", "full_ms")
SCORE_MS: Final = "ranking_ms"
#: The squares of that for one prefix, and for one score.
PREFIX_MS2: Final = "prefix_ms2"
SCORE_MS2: Final = "ranking_ms2"
#: The counters of signals whose prefix KV are, or become, ready here.
READY: Final = tuple(f"signal_{result}" for result in ("computed", "extended", "hbm", "dram", "joined"))


def observed_reserve(view: Overview) -> GroupSeen:
    """The workers that stand by. view: of the fleet's own group."""
    return GroupSeen(workers=tuple(_worker(status) for _, status in sorted(view.living_reserve().items())))


def observed(view: Overview) -> GroupSeen:
    """The group's serving workers lately (ops/status/overview.py: LATELY_S)."""
    seen = [view.workers[name] for name, status in sorted(view.living_workers().items()) if status.state == "serving"]
    tally, per_second = lately(seen)
    prefix_ms = score_ms = prefixes = 0.0
    squares = Counter[str]()
    workers = []
    for each in seen:
        grown = growth(each.last.counters, each.since.counters)
        own = Tally.between(each.since, each.last)
        # A worker that withholds its outcomes tells only for how much of the time its device works.
        told = SCORE_MS in each.last.counters
        seconds = (each.last.sent_ms - each.since.sent_ms) / 1e3
        prefix_ms += sum(grown[name] for name in PREFIX_MS)
        score_ms += grown[SCORE_MS] if told else each.last.busy_share * seconds * 1e3
        squares += Counter({name: grown[name] for name in (PREFIX_MS2, SCORE_MS2)})
        prefixes += max(own.answers["ok"], sum(grown[name] for name in READY) + own.outcomes["full"])
        late = max(0, own.judged - own.within_slo)
        workers.append(_worker(each.last, answers=own.all, late=late, busy=each.last.busy_share))
    told_all = all(PREFIX_MS2 in each.last.counters for each in seen)
    return GroupSeen(
        workers=tuple(workers),
        per_second=per_second,
        prefix_ms=prefix_ms / prefixes if prefixes else 0.0,
        score_ms=score_ms / scored if (scored := tally.answers["ok"]) else 0.0,
        prefix_variation=variation(prefix_ms, squares[PREFIX_MS2], prefixes) if told_all else VARIATION,
        score_variation=variation(score_ms, squares[SCORE_MS2], scored) if told_all else VARIATION,
        p99_ms=tally.quantile_ms(0.99, *KINDS),
        parts=_parts(seen),
    )


def variation(total: float, squares: float, count: float) -> float:
    """The squared coefficient of variation of `count` times, by their sum and that of their squares."""
    return max(0.0, count * squares / total**2 - 1) if total else VARIATION


def _worker(status: WorkerStatus, answers: int = 0, late: int = 0, busy: float = 0.0) -> WorkerSeen:
    given_up = status.given_up or None
    return WorkerSeen(
        name=status.name,
        answers=answers,
        late=late,
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
            per_second=per_second,
            prefix_share=prefix / prefix_ms,
            score_share=score / score_ms,
            p99_ms=tally.quantile_ms(0.99, *KINDS),
        )
    return parts
