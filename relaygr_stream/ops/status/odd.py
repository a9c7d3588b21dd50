"""Oddities of a fleet: facts that an operator should know and that no process can see alone. One line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeVar

from relaygr_stream.bus.away import ranges
from relaygr_stream.ops.status.moving import moves
from relaygr_stream.ops.status.overload import SLO_SHARE, overload
from relaygr_stream.ops.status.overview import Overview, Seen
from relaygr_stream.ops.status.tally import Tally, lately
from relaygr_stream.wire.messages import WorkerStatus
from relaygr_stream.wire.routes import OWN
from relaygr_stream.wire.trigger_status import KEY_PREFIX, TriggerStatus
from relaygr_stream.wire.worker_status import DELEGATED_PINNED, MAX_SKEW_S, THROTTLED_MS, prefix_bytes

MIB = 1 << 20
#: Age in seconds from which a worker without requests is odd.
NEW_S: Final = 60.0
#: A status's counter of what engine/signals.py refused by its tenant's bytes.
OVER_QUOTA: Final = "signal_over_quota"
#: A rollout states its figures every 5 s, and a broker may be away for a while.
SILENT_S: Final = 30.0
S = TypeVar("S", WorkerStatus, TriggerStatus)
#: Fewer rankings have no 99 %.
JUDGED_FROM: Final = 100
#: Share of rankings cut to their newest behaviours that is odd; the alert RelaygrTruncated has the same.
MUCH_CUT: Final = 0.05
#: With fewer hits, prefix KV help little.
FEW_HITS: Final = 0.5


class Oddity(NamedTuple):
    """What is odd, and what to do. urgent: requests suffer now."""

    line: str
    urgent: bool


def findings(view: Overview) -> list[Oddity]:
    """What is odd, what is urgent first."""
    urgent = [Oddity(line, True) for line in (*_unanswered(view), *_slow(view))]
    checks = (
        _missing,
        moves,
        _rollout,
        _clocks,
        _groups,
        _lanes,
        _versions,
        _bounds,
        _unused,
        _throttled,
        _quotas,
        _records,
    )
    found = urgent + [Oddity(line, False) for check in checks for line in check(view)]
    groups = view.groups
    for each in view.scenarios:
        of = findings(each.view) if each in groups else [Oddity(line, True) for line in _slow(each.view)]
        found += [oddity._replace(line=f"scenario {each.scenario}: {oddity.line}") for oddity in of]
    return sorted(found, key=lambda each: not each.urgent)


def oddities(view: Overview) -> list[str]:
    """The findings, one line each."""
    return [each.line for each in findings(view)]


def _moved(view: Overview) -> bool:
    """Whether all users are in other groups of workers, so that these may have ended, or only scenarios are served."""
    if view.routes is not None:
        return not view.routes.share_of(OWN)
    return bool(view.scenarios) and not view.living_workers() and not view.living_triggers()


def _unanswered(view: Overview) -> Iterator[str]:
    if _moved(view):
        return
    serving = [status for status in view.living_workers().values() if status.state == "serving"]
    if not view.living_workers():
        yield "no worker is ready: no request is answered; start one with `relaygr worker`, or look at its log"
    elif not serving:
        yield "no worker serves yet"
    elif free := set(range(view.topics.lanes)) - {lane.lane for status in serving for lane in status.lanes}:
        lanes = ranges(free)
        yield f"lanes without an owner: {lanes}; their rankings wait; start workers if this lasts beyond 30 s"


def _slow(view: Overview) -> Iterator[str]:
    """Rankings lately that had no scores, or had them late. Few tell nothing."""
    seen = [view.workers[name] for name in view.living_workers()]
    tally, rate = lately(seen, view.scenario)
    if tally.all < JUDGED_FROM:
        return
    errors, late, slo = tally.errors, tally.late, view.slo_in_words
    found, within = overload(seen, tally.all, view.scenario), tally.slo_share()
    if found is not None:
        served = "" if within is None else f"; {rate * within:.0f} a second are within {slo}"
        yield (
            f"overload: busy devices of {found.workers} of {len(seen)} workers refused {found.refused} of the last "
            f"{tally.all} rankings, and were late with {found.late}{_cut(tally)}{served}; add workers, or send less"
        )
        errors, late = errors - found.refused, late - found.late
    elif tally.outcomes["truncated"] > tally.all * MUCH_CUT:
        yield f"of the last {tally.all} rankings{_cut(tally)}, since devices have no time for all of them; add workers"
    if errors > tally.all * (1 - SLO_SHARE):
        reasons = ", ".join(f"{count} {status}" for status, count in tally.refused().items())
        yield (
            f"{tally.errors} of the last {tally.all} rankings had no scores ({reasons}); overloaded and "
            f"deadline_exceeded: add workers; rejected and failed: the workers' logs have the reason"
        )
    if late > tally.judged * (1 - SLO_SHARE):
        yield (
            f"{late} of the last {tally.judged} rankings took longer than {slo} ({view.slo_key}) on the worker; "
            f"{_speed_up(tally)}"
        )


def _cut(tally: Tally) -> str:
    cut = tally.outcomes["truncated"]
    return f", {cut} are of the newest behaviours alone" if cut else ""


def _speed_up(tally: Tally) -> str:
    """What to do about late rankings of devices that have time."""
    if (tally.hit_rate() or 0.0) < FEW_HITS:
        return "few find prefix KV: `relaygr explain --seconds 5` says why"
    return "a trace of one shows where the time goes (telemetry.traces)"


def _missing(view: Overview) -> Iterator[str]:
    if not view.living_triggers() and not _moved(view):
        yield (
            "no trigger runs: nothing is pre-inferred, and only users with prefix KV of earlier rankings hit; "
            "start `relaygr trigger`"
        )
    for name in view.silent():
        yield f"{name} crashed or is cut off: no status; `relaygr status --forget {name}` removes its record"


def _clocks(view: Overview) -> Iterator[str]:
    now = view.clock()
    living: dict[str, Seen[WorkerStatus] | Seen[TriggerStatus]] = {
        name: seen for name, seen in view.workers.items() if seen.is_alive(now, view.silence_ms)
    }
    living |= {KEY_PREFIX + name: seen for name, seen in view.triggers.items() if seen.is_alive(now, view.silence_ms)}
    for name, seen in sorted(living.items()):
        if abs(seen.ahead_ms) > MAX_SKEW_S * 1e3:
            off = "ahead of" if seen.ahead_ms > 0 else "behind"
            yield f"{name}: its clock is {abs(seen.ahead_ms) / 1e3:.0f} s {off} the broker's; set the clocks (NTP)"


def _rollout(view: Overview) -> Iterator[str]:
    rollout = (view.routes and view.routes.rollout) or None
    if view.routes is None or rollout is None or rollout.state != "moving" or not view.routes.share_of(rollout.group):
        return
    if (silent_s := (view.now_ms() - view.routes.sent_ms) / 1e3) > SILENT_S:
        yield (
            f"rollout to {rollout.group or 'default'}: its command has said nothing for {silent_s:.0f} s; if it has "
            f"ended, users stay where they are: run it again to go on, or `relaygr rollout --back`"
        )


def _groups(view: Overview) -> Iterator[str]:
    groups = sorted({status.group for status in view.living_triggers().values()})
    if len(groups) > 1:
        yield (
            f"triggers in {len(groups)} groups ({', '.join(groups)}): each admits on its own, so bounds are exceeded; "
            f"remove trigger.group from their settings"
        )
    deciding: dict[int, str] = {}
    for name, status in view.living_triggers().items():
        both = [lane for lane in status.lanes if lane in deciding and len(groups) == 1]
        if both:
            yield f"lanes {ranges(both)} are decided by {deciding[both[0]]} and {name}"
        deciding.update(dict.fromkeys(status.lanes, name))


def _lanes(view: Overview) -> Iterator[str]:
    lanes = set(range(view.topics.lanes))
    serving = {name: s for name, s in view.living_workers().items() if s.state == "serving"}
    owned = {lane.lane for status in serving.values() for lane in status.lanes}
    if owned == lanes and (idle := sorted(name for name, status in serving.items() if not status.lanes)):
        yield (
            f"{', '.join(idle)}: no lane, and so no request: {len(lanes)} lanes are shared by {len(serving)} workers; "
            f"if this lasts, `relaygr lanes grow {2 * len(lanes)}` adds some while everything serves"
        )
    triggers = view.living_triggers().values()
    if triggers and (free := lanes - {lane for status in triggers for lane in status.lanes}):
        yield (
            f"lanes that no trigger decides for: {ranges(free)}; nothing is pre-inferred there; "
            f"start a trigger if this lasts beyond 30 s"
        )


def _versions(view: Overview) -> Iterator[str]:
    workers, triggers = view.living_workers().values(), view.living_triggers().values()
    for what, versions in (
        ("versions run", ({s.version for s in workers} | {s.version for s in triggers}) - {""}),
        ("models score", {status.model_version for status in workers}),
    ):
        if len(versions) > 1:
            yield f"{len(versions)} {what}: {', '.join(sorted(versions))}"


def _bounds(view: Overview) -> Iterator[str]:
    """Workers whose bounds refuse every request, or every longest one."""
    policies = [status.policy for status in view.living_triggers().values()]
    delegates = any(policy.delegate for policy in policies)
    longest = min((policy.max_prefix_tokens for policy in policies), default=view.settings.relay.max_prefix_tokens)
    for name, status in view.living_workers().items():
        if not status.lanes or status.bytes_per_token < 1 or status.alloc_bytes < 1:
            continue
        needs = prefix_bytes(longest, status)
        whole = sum(lane.budget_bytes for lane in status.lanes)
        if 0 < whole < needs:
            yield (
                f"{name}: its whole pinned share, {whole / MIB:.1f} MiB, is too small for a longest prefix "
                f"({longest} tokens: {needs / MIB:.1f} MiB); raise worker.hbm_bytes or worker.pinned_share"
            )
        pinned = status.counters.get(DELEGATED_PINNED)  # None: of a release that does not tell its whole room
        if delegates and pinned is not None and (room_bytes := status.delegated_bytes + pinned) < needs:
            yield (
                f"{name}: its room for other workers' users, {room_bytes / MIB:.1f} MiB, is too small for a longest "
                f"prefix ({longest} tokens: {needs / MIB:.1f} MiB), and none is delegated to it; raise worker.hbm_bytes"
            )


def _unused(view: Overview) -> Iterator[str]:
    """Workers without requests, while others get some; new ones have had no time for any."""
    asked = {
        name: sum(total for key, total in status.counters.items() if key.startswith("answers_") or key == "signals")
        for name, status in view.living_workers().items()
        if status.lanes
    }
    if any(asked.values()):
        for name in sorted(name for name, total in asked.items() if not total):
            status = view.workers[name].last
            if status.sent_ms / 1e3 - status.incarnation / 1e9 < NEW_S:
                continue
            yield f"{name}: no request for its lanes since its start"


def _throttled(view: Overview) -> Iterator[str]:
    """Processes that brokers have throttled since this viewer's start or, seen once, since their own."""
    workers, triggers = view.living_workers(), view.living_triggers()
    grown = {
        name: _grown(view.workers[name], lambda status: status.counters.get(THROTTLED_MS, 0.0)) for name in workers
    }
    grown |= {name: _grown(view.triggers[name], lambda status: status.throttled_ms) for name in triggers}
    for name, ms in grown.items():
        if ms > 0:
            mend = "raise the quota of its client id or user"
            yield f"{name}: brokers throttled it for {ms / 1e3:.1f} s by a quota; {mend}"


def _quotas(view: Overview) -> Iterator[str]:
    """Workers on which a tenant's announced requests were beyond its bytes, in the same time."""
    for name in view.living_workers():
        if count := _grown(view.workers[name], lambda status: status.counters.get(OVER_QUOTA, 0.0)):
            yield (
                f"{name}: {count:.0f} announced requests pinned nothing, since their tenant had its max_pinned_bytes "
                f"pinned; the worker's log names it"
            )


def _grown(seen: Seen[S], total: Callable[[S], float]) -> float:
    """What the total gained since this viewer's start or, of a process seen once, since its own."""
    last = total(seen.last)
    return last if seen.first is seen.last else last - total(seen.first)


def _records(view: Overview) -> Iterator[str]:
    for reason, count in sorted(view.refused.items()):
        yield f"{count} records of worker-status are ignored: {reason}"
