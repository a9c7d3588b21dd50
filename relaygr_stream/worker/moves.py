"""Which scenario a worker serves, by the newest assignments (wire/assignments.py).

    assignments ─► take ─► target: the scenario to serve; the worker leaves where that is another than it serves
    a move that failed ─► give_up ─► it serves what it served before, until a later epoch

Knows neither Kafka nor how a worker leaves or joins (run.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import structlog

from relaygr_stream.settings.scenarios import SECTION
from relaygr_stream.wire.assignments import Assignments
from relaygr_stream.wire.messages import GivenUp

log = structlog.get_logger(__name__)

#: Characters of a reason that a status states (wire/messages.py: GivenUp).
MAX_REASON: Final = 200


class ScenarioMoves:
    """name: the worker's. own: the scenario that it was started for; "": none. known: those that it has settings of.

    serving: that it serves, or is on its way to. assigned: the epoch that it obeys; None: none.
    """

    def __init__(self, name: str = "", own: str = "", known: Iterable[str] = ()) -> None:
        self._name, self._own = name, own
        self._known = {"", own, *known}
        self._newest: Assignments | None = None
        self._news = asyncio.Event()
        self._under_way = True
        self.serving = own
        self.assigned: int | None = None
        self.given_up: GivenUp | None = None

    def take(self, newest: Assignments | None) -> None:
        """These assignments count from now on."""
        self._newest = newest
        if self.target not in self._known:
            self.give_up(
                f"no file of this worker has a section [{SECTION}{self.target}] with workers of its own", self.serving
            )
        self._settle()
        self._news.set()

    @property
    def epoch(self) -> int:
        """That of the newest assignments; 0: there are none."""
        return 0 if self._newest is None else self._newest.epoch

    @property
    def target(self) -> str:
        """The scenario to serve now."""
        if self._newest is None or (self.given_up is not None and self.given_up.epoch == self.epoch):
            return self.serving
        return self._newest.workers.get(self._name, self._own)

    async def until_away(self, stop: asyncio.Event) -> None:
        """Wait until the process stops, or is to serve another scenario."""
        ends = [asyncio.ensure_future(wait) for wait in (stop.wait(), self._until_called())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in ends:
                each.cancel()

    async def _until_called(self) -> None:
        while self.target == self.serving:
            self._news.clear()
            await self._news.wait()

    def set_out(self) -> str:
        """It is on its way to the target, which is returned."""
        self.serving, self._under_way = self.target, True
        return self.serving

    def arrive(self) -> None:
        """It serves."""
        self._under_way = False
        self._settle()

    def give_up(self, reason: str, back: str, epoch: int | None = None) -> None:
        """The move of this epoch, by default the newest, has failed: it serves `back`, and does not try it again."""
        epoch = self.epoch if epoch is None else epoch
        log.warning("gives up its move to another scenario", back=back, epoch=epoch, reason=reason)
        self.given_up, self.serving = GivenUp(epoch=epoch, reason=reason[:MAX_REASON]), back

    def stated(self) -> dict[str, Any]:
        """What a status says of it."""
        fields = {"assigned": self.assigned, "given_up": self.given_up}
        return {name: value for name, value in fields.items() if value is not None}

    def _settle(self) -> None:
        given_up = self.given_up is not None and self.given_up.epoch == self.epoch
        if self._newest is not None and self.target == self.serving and not (given_up or self._under_way):
            self.assigned = self.epoch
