"""Runs a rollout: makes the group's topics, waits for its workers, moves the routes step by step, and back if it must.

The routes are the state: a rollout that is started again goes on from the share that they name. Users who move take one
step at a time; what they have in the old group stays there, and is used again if they come back.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Gauge

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.newest import ASK_S
from relaygr_stream.bus.producer import Producer
from relaygr_stream.errors import AccessDenied, BrokerError, ConfigError, RelayError
from relaygr_stream.ops.rollout.comparing import Comparison
from relaygr_stream.ops.rollout.in_place import InPlace
from relaygr_stream.ops.rollout.judgement import Observed, decide
from relaygr_stream.ops.rollout.observing import WorkersView
from relaygr_stream.ops.rollout.routing import Bus, label, source_of
from relaygr_stream.ops.rollout.warming import ENOUGH, Warming
from relaygr_stream.telemetry.printable import Say
from relaygr_stream.wire.routes import POSITIONS, RolloutProgress, Routes

log = structlog.get_logger(__name__)

LOOK_S: Final = 0.5
#: Figures are stated so often.
TELL_S: Final = 5.0
#: Clients look for a topic that is new every ASK_S; one that is told late serves its users where they were.
FIRST_S: Final = 2 * ASK_S
#: How far the comparison of models has come is told so often.
COMPARING_S: Final = 30.0
#: A new group must have all its lanes served within this: a large model loads for minutes.
START_S: Final = 1800.0


@dataclass(frozen=True)
class Plan:
    """steps: shares of the users in 10,000ths, rising, the last one all. hold_s: how long each lasts at least."""

    steps: tuple[int, ...]
    hold_s: float

    @classmethod
    def from_shares(cls, steps: Sequence[float], hold_s: float) -> Plan:
        """Of shares between 0 and 1. Raises ConfigError unless they rise to 1."""
        shares = tuple(round(step * POSITIONS) for step in steps)
        if not shares or shares[0] <= 0 or list(shares) != sorted(set(shares)) or shares[-1] != POSITIONS:
            raise ConfigError("--canary and --steps must rise to 100, such as --canary 5% --steps 25,50,100")
        return cls(shares, hold_s)


class RolloutMetrics:
    """Of a rollout in progress."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.step = Gauge("relaygr_rollout_step", "Number of the rollout's step, from 1.", registry=registry)

        def gauge(name: str, meaning: str) -> Gauge:
            return Gauge(f"relaygr_rollout_{name}", meaning, ["group", "version"], registry=registry)

        self.share = gauge("share", "Part of the users in the group.")
        self.hits = gauge("hit_rate", "Part of the group's rankings in this step that found prefix KV.")
        self.p99 = gauge("p99_seconds", "P99 of the group's rankings in this step, on the worker.")

    def show(self, routes: Routes, observed: dict[str, Observed]) -> None:
        """Of the step as it is now."""
        if routes.rollout:
            self.step.set(routes.rollout.step + 1)
        for group, found in observed.items():
            labels, figures = (label(group), found.version), found.figures()
            self.share.labels(*labels).set(routes.share_of(group) / POSITIONS)
            self.hits.labels(*labels).set(figures.hits)
            self.p99.labels(*labels).set(figures.p99_ms / 1e3)


class Started(Protocol):
    """The processes that a rollout has started for its group."""

    @property
    def exit_code(self) -> int | None:
        """Of what keeps them; None while it runs."""

    async def ended(self) -> int:
        """Wait for its end; returns the exit code."""


@dataclass(frozen=True)
class Parts:
    """What a rollout works with. started: its group's processes; None: an operator's. say: prints a line. in_place: the
    workers that move between the groups; None: each group keeps its own. settle_s: clients follow the routes, and what
    they have begun is over, within this."""

    bus: Bus
    producer: Producer
    metrics: RolloutMetrics
    say: Say
    started: Started | None = None
    in_place: InPlace | None = None
    settle_s: float = 0.0


class Rollout:
    """One rollout to the group `to`; new, old: the views of that group, and of the one that the users come from.

    comparison: of both models before the first step; None: they may be unlike.
    """

    def __init__(
        self,
        parts: Parts,
        plan: Plan,
        routes: Routes,
        to: str,
        new: WorkersView,
        old: WorkersView,
        warming: Warming | None = None,
        comparison: Comparison | None = None,
    ) -> None:
        self._parts = parts
        self._plan = plan
        self._routes = routes
        self._to = to
        self._from = source_of(routes, to)
        self._new, self._old = new, old
        self._warming, self._comparison = warming, comparison
        self.why_back = ""
        self.moved = False  # whether any user has moved
        self._before = Observed()  # what the old group did in the last step in which it had users

    async def wait_for_workers(self) -> None:
        """Until all lanes of the new group have an owner. Raises RelayError if that takes too long, or cannot be."""
        began, in_place = time.monotonic(), self._parts.in_place
        if in_place is not None:
            await in_place.begin()
        while self._new.missing_lanes:
            self._check_started()
            if time.monotonic() - began > START_S:
                raise RelayError(
                    f"group {label(self._to)}: {self._new.missing_lanes} lanes have no owner after {START_S:g} s; look "
                    f"at its workers' logs"
                )
            await asyncio.sleep(LOOK_S)
        if len(self._new.versions) > 1:
            raise RelayError(
                f"group {label(self._to)} has workers of several models: {', '.join(self._new.versions)}; stop those "
                f"that are not to serve, and run the rollout again"
            )
        self._parts.say(f"group {label(self._to)} serves {', '.join(self._new.versions)}")

    async def run(self) -> bool:
        """Move all users; False: they have come back. Cancelled, it leaves the routes as they are."""
        steps = self._plan.steps
        left = [number for number, share in enumerate(steps) if share > self._routes.share_of(self._to)]
        left = left or [len(steps) - 1]  # of a rollout that is continued
        self._aim(steps[left[0]])
        if (why := await self._why_unlike()) is not None:
            await self.back(why)
            return False
        await self._wait_until_warm()
        for number in left:
            if self._warming is not None and (warmed := self._warming.progress()).users:
                self._parts.say(str(warmed))
            share, last = steps[number], steps[number] == POSITIONS
            progress = RolloutProgress(state="moving", group=self._to, steps=steps, step=number)
            await self._move_workers(share, progress)
            await self._move(share, progress)
            self._parts.say(
                f"step {number + 1} of {len(steps)}: {share / POSITIONS:.0%} of the users are in group "
                f"{label(self._to)}, for at least {self._plan.hold_s:g} s"
            )
            self._aim(share if last else steps[number + 1])
            if (why := await self._hold(last=last)) is not None:
                await self.back(why)
                return False
        if self._parts.in_place is not None:
            await self._parts.in_place.finish()
        await self._state("done")
        self._parts.say(f"done: all users are in group {label(self._to)}")
        return True

    async def back(self, why: str) -> None:
        """Move the users back, and say why."""
        who = "the users came back" if self._routes.share_of(self._to) else "nobody moved"
        self.why_back = f"{who}: {why}"
        self._parts.say(f"back: {why}")
        steps = self._plan.steps
        now = self._routes.rollout or RolloutProgress(state="back", group=self._to, steps=steps)
        await self._move(0, msgspec.structs.replace(now, state="back", reason=why[:500]))
        self._parts.say(f"all users are in group {label(self._from)}")
        if (in_place := self._parts.in_place) is not None:
            if self.moved:
                await asyncio.sleep(self._parts.settle_s)
            await in_place.back()

    async def _move_workers(self, share: int, progress: RolloutProgress) -> None:
        """In place: as many as this share of the users needs, each followed by its part of them."""
        in_place = self._parts.in_place
        while in_place is not None and (meanwhile := in_place.share_before_next(share)) is not None:
            if meanwhile > self._routes.share_of(self._to):
                await self._move(meanwhile, progress)
            await in_place.move_next()

    def _aim(self, share: int) -> None:
        """Have users prefilled who move next, to this share."""
        if self._warming is not None:
            self._warming.aim(self._routes, self._routes.moved(self._to, self._new.lanes, share))

    @property
    def _warm(self) -> bool:
        return self._warming is None or self._warming.progress().share >= ENOUGH

    async def _wait_until_warm(self) -> None:
        """Before the first step, at most as long as one lasts."""
        began, warming = time.monotonic(), self._warming
        while warming and time.monotonic() - began < self._plan.hold_s and (warming.looking_s > 0 or not self._warm):
            self._check_started()
            await asyncio.sleep(min(LOOK_S, self._plan.hold_s))

    async def _why_unlike(self) -> str | None:
        """Compare the models while the old group has users; returns why nobody must move."""
        if self._comparison is None or not self._routes.share_of(self._from):
            return None
        try:
            async with self._comparison as comparison:
                return await self._compared(comparison)
        except AccessDenied as error:
            log.warning("the models are not compared: rankings cannot be read", error=str(error))
            return None

    async def _compared(self, comparison: Comparison) -> str | None:
        told = -math.inf
        while (decision := await comparison.turn()).action == "stay":
            self._check_started()
            if time.monotonic() - told >= COMPARING_S:
                told = time.monotonic()
                self._parts.say(decision.reason)
        if decision.action == "back":
            return decision.reason
        self._parts.say(decision.reason)
        return None

    async def _hold(self, *, last: bool) -> str | None:
        """Watch the step to its end; returns why the users must go back."""
        began = told = time.monotonic()
        self._new.begin()
        self._old.begin()
        said = ""
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = time.monotonic()
            if now_s - began >= self._plan.hold_s / 2:
                self._new.settle()
                self._old.settle()
            new, old = self._new.observed(), self._old.observed()
            decision = decide(
                new, self._before if last else old, now_s - began, self._plan.hold_s, last=last, warm=self._warm
            )
            if self._parts.started is not None and self._parts.started.exit_code is not None:
                return f"its processes have ended with exit code {self._parts.started.exit_code}"
            if decision.action == "back":
                return decision.reason
            if decision.action != "stay":
                self._before = old
                return None
            if decision.reason and not said:
                said = decision.reason
                self._parts.say(said)
            if now_s - told >= TELL_S:
                told = now_s
                await self._tell({self._to: new, self._from: old}, decision.reason)

    async def _move(self, share: int, progress: RolloutProgress) -> None:
        routes = self._routes.moved(self._to, self._new.lanes, share)
        routes = msgspec.structs.replace(routes, epoch=max(routes.epoch, now_ms()), rollout=progress)
        self.moved |= max(share, self._routes.share_of(self._to)) > 0
        self._routes = routes  # first: who is stopped in the middle of it goes back all the same
        while True:  # while no broker takes it, the users stay where they are
            try:
                await self._parts.bus.write(self._parts.producer, routes)
                break
            except BrokerError as error:
                log.warning("the routes cannot be written now", error=str(error))
                await asyncio.sleep(LOOK_S)
        self._parts.metrics.show(routes, {self._to: self._new.observed(), self._from: self._old.observed()})

    async def _tell(self, observed: dict[str, Observed], reason: str) -> None:
        self._parts.metrics.show(self._routes, observed)
        await self._state("moving", reason, observed)

    async def _state(self, state: str, reason: str = "", observed: dict[str, Observed] | None = None) -> None:
        assert self._routes.rollout, "it has moved"
        figures = {group: each.figures() for group, each in (observed or {}).items()} or self._routes.rollout.figures
        progress = msgspec.structs.replace(self._routes.rollout, state=state, reason=reason, figures=figures)
        self._routes = msgspec.structs.replace(self._routes, rollout=progress)
        try:
            await self._parts.bus.write(self._parts.producer, self._routes)
        except BrokerError as error:  # for people only
            log.warning("the figures cannot be written now", error=str(error))

    def _check_started(self) -> None:
        started = self._parts.started
        if started is not None and started.exit_code is not None:
            raise RelayError(f"the processes of group {label(self._to)} ended with exit code {started.exit_code}")
