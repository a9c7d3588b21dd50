"""A rollout in place: workers leave the users' group for the new one, one after the other, without a new process.

a step's share ─► workers_for ─► one more is assigned to the new group ─► verified by its status ─► users follow

The assignments (wire/assignments.py) are the state, as the routes are of the users: a rollout that is started again
goes on with the workers that they name. One worker stays in the old group until all users have been served well by the
new one, so that they can come back at any time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from relaygr_stream.bus.producer import Producer
from relaygr_stream.errors import BrokerError, ConfigError, RelayError
from relaygr_stream.ops.rollout.observing import WorkersView
from relaygr_stream.ops.rollout.routing import Bus, label
from relaygr_stream.telemetry.printable import Say, printable
from relaygr_stream.wire.assignments import ROLLOUT, Assignments
from relaygr_stream.wire.messages import WorkerStatus
from relaygr_stream.wire.routes import OWN, POSITIONS

log = structlog.get_logger(__name__)

LOOK_S: Final = 0.5
#: What it waits for is told so often.
TELL_S: Final = 30.0
#: A worker must serve there within this: a large model loads for minutes.
ARRIVE_S: Final = 1800.0
#: Triggers follow within a second, and join within a rebalance or two.
TRIGGERS_S: Final = 30.0


def workers_for(share: int, workers: int) -> int:
    """How many of these serve the new group while it has this share of the users: at least one, and never all."""
    return min(workers - 1, max(1, round(share * workers / POSITIONS)))


def share_meanwhile(moved: int, workers: int) -> int:
    """The share of the users in the new group while one more worker is on its way: as many users for each worker that
    serves, in both groups."""
    return POSITIONS * moved // (workers - 1)


def check(assigned: Assignments | None, *, in_place: bool, to: str, checkpoint: str, source: str) -> None:
    """Raise ConfigError for a rollout that does not fit what workers of this relay are assigned to."""
    if assigned is None:
        assigned = Assignments(epoch=0, sent_ms=0, planner=ROLLOUT, workers={})
    if not in_place:
        if assigned.home != OWN or assigned.checkpoints:
            raise ConfigError(
                f"workers serve group {label(unfinished(assigned) or assigned.home)} in place, and those that start "
                f"now would, too: give --in-place"
            )
        return
    if assigned.planner != ROLLOUT:
        raise ConfigError(
            f"planner {printable(assigned.planner)} assigns the workers of this relay: a rollout in place would undo "
            f"its moves; leave out --in-place, and give the new version other workers"
        )
    if source != assigned.home:
        raise ConfigError(
            f"--in-place moves workers that were started for group {label(OWN)}, and they serve group "
            f"{label(assigned.home)}; the users are in {label(source)}: leave out --in-place"
        )
    if not checkpoint and to != OWN:
        raise ConfigError(f"--in-place to group {label(to)} needs its model: give --checkpoint FOLDER")
    if (other := unfinished(assigned)) not in (None, to):
        raise ConfigError(
            f"workers are on their way to group {label(other or OWN)}: finish that, or take it --back, first"
        )
    if (before := assigned.checkpoints.get(to, "")) != checkpoint and unfinished(assigned) == to:
        raise ConfigError(
            f"workers are on their way to group {label(to)} with the model in {before or 'their settings'}: go on with "
            f"that one, or take it --back first"
        )


def unfinished(assigned: Assignments | None) -> str | None:
    """The group of a rollout in place that has not ended; None: there is none."""
    if assigned is None or assigned.planner != ROLLOUT:
        return None
    return next(iter(assigned.workers.values()), None)


class InPlace:
    """The workers of one rollout. checkpoint: the new group's model; "": that of the workers' settings.

    assigned: by earlier runs of the command. new, old: views of the groups. finished: all are on their way, for good.
    """

    def __init__(
        self,
        bus: Bus,
        producer: Producer,
        to: str,
        checkpoint: str,
        assigned: Assignments | None,
        new: WorkersView,
        old: WorkersView,
        say: Say,
    ) -> None:
        self._bus, self._producer, self._say = bus, producer, say
        self._to, self._new, self._old = to, new, old
        self._home = assigned.home if assigned is not None else OWN
        kept = {self._home: assigned.checkpoints[self._home]} if assigned and self._home in assigned.checkpoints else {}
        self._before: Mapping[str, str] = kept
        self._models = kept | ({to: checkpoint} if checkpoint else {})
        self._moved: set[str] = set(assigned.workers if assigned is not None else ())
        self._epoch = 0 if assigned is None else assigned.epoch
        self._most = 0
        self.finished = False
        if self._count < 2:
            raise ConfigError(
                f"--in-place: group {label(self._home)} has {self._count} worker, and while that loads the new model "
                f"nobody would answer; run two, or leave out --in-place and give both versions less of the memory, or "
                f"stop `relaygr up` and start it with the new model"
            )

    @property
    def _count(self) -> int:
        """The most workers that served at a time: one that was killed comes back, and users wait for it."""
        self._most = max(self._most, len({*self._old.workers, *self._new.workers, *self._moved}))
        return self._most

    @property
    def _left(self) -> dict[str, WorkerStatus]:
        """Those that serve the old group, and are to."""
        old = self._old.workers.items()
        return {name: status for name, status in old if name not in self._moved and status.state == "serving"}

    def share_before_next(self, share: int) -> int | None:
        """The share of the users in the new group while the next worker moves; None: the step needs no more."""
        moved, count = len(self._moved), self._count
        return min(share, share_meanwhile(moved, count)) if moved < workers_for(share, count) else None

    async def begin(self) -> None:
        """Have one serve the new group, or those that earlier runs of the command moved. Raises as move_next."""
        await (self._until_there(self._moved) if self._moved else self.move_next())

    async def move_next(self) -> None:
        """Have the least busy one serve the new group, and wait until it does, and both groups own all their lanes.

        Before, wait for another one, which stays. Raises RelayError where either does not come.
        """
        stays = f"another worker that serves group {label(self._home)}, since one has to stay"
        await self._until_none(lambda: "" if len(self._left) > 1 else stays)
        left = self._left
        name = min(left, key=lambda each: (left[each].busy_share, each))
        self._moved.add(name)
        self._say(f"worker {name} moves to group {label(self._to)} ({len(self._moved)} of {self._count})")
        await self._assign(dict.fromkeys(self._moved, self._to), self._home, self._models)
        await self._until_there({name})

    async def finish(self) -> None:
        """Have all workers and triggers serve the new group from now on, also when they are started again."""
        self.finished = True
        await self._assign({}, self._to, {each: model for each, model in self._models.items() if each == self._to})
        self._say(f"the other workers, and triggers, move to group {label(self._to)}")
        await self._until_there({*self._old.workers} - self._moved)
        for _ in range(int(TRIGGERS_S / LOOK_S)):
            if len(self._new.triggers) > 1:  # one is this command's
                return
            await asyncio.sleep(LOOK_S)
        self._say(f"no trigger has come to group {label(self._to)}: restart `relaygr up`, or start one")

    async def back(self) -> None:
        """Have the workers serve what they served before. The users have gone."""
        if not self.finished:
            self._moved.clear()
            await self._assign({}, self._home, self._before)
            self._say(f"the workers move back to group {label(self._home)}")

    async def _assign(self, workers: Mapping[str, str], home: str, models: Mapping[str, str]) -> None:
        while True:
            try:
                self._epoch = await self._bus.assign(self._producer, workers, home, models)
                return
            except BrokerError as error:
                log.warning("the assignments cannot be written now", error=str(error))
                await asyncio.sleep(LOOK_S)

    @property
    def told(self) -> str:
        """What an operator is to know once it has finished."""
        if not (model := self._models.get(self._to)):
            return "workers that were started for group default serve the model of their own settings again"
        return (
            f"workers that were started for group default serve {model} from now on, also when `relaygr up` starts "
            f"them again: keep the folder. model.checkpoint of their settings does not count until a rollout in place "
            f"to group default, without --checkpoint"
        )

    async def _until_there(self, names: set[str]) -> None:
        def missing() -> str:
            away = sorted(name for name in names if not self._is_there(name))
            for name in away:
                found = self._old.workers.get(name)
                if found is not None and found.given_up and found.given_up.epoch >= self._epoch:
                    raise RelayError(f"worker {name} gave up its move: {printable(found.given_up.reason)}")
            return ", ".join(away) or ("owners of all lanes" if self._unowned else "")

        await self._until_none(missing)

    async def _until_none(self, missing: Callable[[], str]) -> None:
        """Wait until nothing is missing, and tell what is. Raises RelayError after ARRIVE_S."""
        began = told = time.monotonic()
        while waits_for := missing():
            if (now_s := time.monotonic()) - began > ARRIVE_S:
                raise RelayError(f"group {label(self._to)} has waited {ARRIVE_S:g} s for {waits_for}; see its log")
            if now_s - told >= TELL_S:
                told = now_s
                self._say(f"waits for {waits_for}")
            await asyncio.sleep(LOOK_S)

    @property
    def _unowned(self) -> int:
        return self._new.missing_lanes + (0 if self.finished else self._old.missing_lanes)

    def _is_there(self, name: str) -> bool:
        status: WorkerStatus | None = self._new.workers.get(name)
        return status is not None and status.state == "serving" and (status.assigned or 0) >= self._epoch


async def leave(bus: Bus, producer: Producer, say: Say) -> bool:
    """Take the workers of an unfinished rollout in place back; returns whether there were some. Raises BrokerError."""
    assigned = await bus.assignments()
    if assigned is None or unfinished(assigned) is None:
        return False
    models = {group: model for group, model in assigned.checkpoints.items() if group == assigned.home}
    await bus.assign(producer, {}, assigned.home, models)
    say(f"the workers move back to group {label(assigned.home)}")
    return True
