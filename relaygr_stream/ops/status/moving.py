"""Workers that are not where the assignments say: on their way, or back from a move that they gave up."""

from __future__ import annotations

from collections.abc import Iterator

from relaygr_stream.fleet import DROP_AFTER_S
from relaygr_stream.ops.status.overview import Overview
from relaygr_stream.settings.scenarios import RESERVE, scenario_in_words
from relaygr_stream.wire.messages import WorkerStatus


def moves(view: Overview) -> Iterator[str]:
    """One line for each; a worker that no group has seen is on its way for DROP_AFTER_S, and then an old name."""
    newest = view.assignments
    if newest is None:
        return
    views = [("", view), *((each.scenario, each.view) for each in view.groups)]
    living = {name: (RESERVE, status) for name, status in view.living_reserve().items()}
    living |= {name: (at, status) for at, of in views for name, status in of.living_workers().items()}
    leaving = {name: at for at, of in views for name, seen in of.workers.items() if seen.last.state == "draining"}
    for name, target in sorted(newest.workers.items()):
        if target in newest.checkpoints:  # in place: `relaygr rollout` tells of it
            continue
        at, status = living.get(name, (target, None))
        to = scenario_in_words(target)
        if status is not None and at != target:
            where = "it stands by" if at == RESERVE else f"it serves {scenario_in_words(at)}"
            yield f"{name} {_why(status, newest.epoch, to)}; {where}"
        elif status is None and name in leaving:
            yield f"{name} moves to {to}: it leaves {scenario_in_words(leaving[name])}"
        elif status is None and view.now_ms() - newest.epoch < DROP_AFTER_S * 1e3:
            yield f"{name} moves to {to}: it is in no group now"


def _why(status: WorkerStatus, epoch: int, to: str) -> str:
    gave_up = status.given_up if status.given_up and status.given_up.epoch == epoch else None
    return f"is to move to {to}" if gave_up is None else f"gave up its move to {to} ({gave_up.reason})"
