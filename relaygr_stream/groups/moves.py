"""Which group a worker or a trigger serves, by the newest assignments (wire/assignments.py).

    assignments ─► take ─► target: the place to serve; the process leaves where that is another than it serves
    a move that failed ─► give_up ─► it serves what it served before, until a later epoch

Knows neither Kafka nor how a process leaves or joins (live.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import structlog

from relaygr_stream.settings.scenarios import RESERVE, SECTION, scenario_in_words
from relaygr_stream.wire.assignments import Assignments
from relaygr_stream.wire.messages import GivenUp

log = structlog.get_logger(__name__)

#: Characters of a reason that a status states (wire/messages.py: GivenUp).
MAX_REASON: Final = 200


class ServedGroup(NamedTuple):
    """A group, and the folder of its model; "": as the settings of the process say."""

    group: str
    checkpoint: str = ""


def _serves_any(_: ServedGroup) -> str:
    return ""


class GroupMoves:
    """name: the worker's; "": a trigger's. own: the scenario that it was started for; "": none. known: those that it
    has settings of. why_not: why it cannot serve a place, asked on a thread before it leaves; "": it may.

    serving: that it serves, or is on its way to. assigned: the epoch that it obeys; None: none.
    """

    def __init__(
        self,
        name: str = "",
        own: str = "",
        known: Iterable[str] = (),
        why_not: Callable[[ServedGroup], str] = _serves_any,
    ) -> None:
        self._name, self._own = name, own
        self._known = {"", own, *known}
        self._scenarios = {RESERVE, *self._known} - {""}
        self._why_not = why_not
        self._newest: Assignments | None = None
        self._news = asyncio.Event()
        self._under_way = True
        self.serving = ServedGroup(own)
        self.assigned: int | None = None
        self.given_up: GivenUp | None = None

    def take(self, newest: Assignments | None) -> None:
        """These assignments count from now on."""
        self._newest = newest
        target = self.target
        if target.group not in self._known and not target.checkpoint:
            self.give_up(
                f"no file of this worker has a section [{SECTION}{target.group}] with workers of its own", self.serving
            )
        self._settle()
        self._news.set()

    @property
    def epoch(self) -> int:
        """That of the newest assignments; 0: there are none."""
        return 0 if self._newest is None else self._newest.epoch

    @property
    def target(self) -> ServedGroup:
        """The place to serve now."""
        newest = self._newest
        if newest is None or (self.given_up is not None and self.given_up.epoch == self.epoch):
            return self.serving
        group = newest.workers.get(self._name, self._own or newest.home)
        return ServedGroup(group, "" if group in self._scenarios else newest.checkpoints.get(group, ""))

    def in_words(self, place: ServedGroup) -> str:
        """For people."""
        group = place.group
        return scenario_in_words(group) if group in self._scenarios else f"group {group or 'default'}"

    async def until_away(self, stop: asyncio.Event) -> None:
        """Wait until the process stops, or is to serve another place."""
        ends = [asyncio.ensure_future(wait) for wait in (stop.wait(), self._until_called())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in ends:
                each.cancel()

    async def _until_called(self) -> None:
        while True:
            while self.target == self.serving:
                self._news.clear()
                await self._news.wait()
            epoch, why = self.epoch, await asyncio.to_thread(self._why_not, self.target)
            if not why:
                return
            self.give_up(why, self.serving, epoch)

    def set_out(self) -> ServedGroup:
        """It is on its way to the target, which is returned."""
        self.serving, self._under_way = self.target, True
        return self.serving

    def arrive(self) -> None:
        """It serves."""
        self._under_way = False
        self._settle()

    def give_up(self, reason: str, back: ServedGroup, epoch: int | None = None) -> None:
        """The move of this epoch, by default the newest, has failed: it serves `back`, and does not try it again."""
        epoch = self.epoch if epoch is None else epoch
        log.warning("gives up its move to another group", back=self.in_words(back), epoch=epoch, reason=reason)
        self.given_up, self.serving = GivenUp(epoch=epoch, reason=reason[:MAX_REASON]), back

    def stated(self) -> dict[str, Any]:
        """What a status says of it."""
        fields = {"assigned": self.assigned, "given_up": self.given_up}
        return {name: value for name, value in fields.items() if value is not None}

    def _settle(self) -> None:
        given_up = self.given_up is not None and self.given_up.epoch == self.epoch
        if self._newest is not None and self.target == self.serving and not (given_up or self._under_way):
            self.assigned = self.epoch
