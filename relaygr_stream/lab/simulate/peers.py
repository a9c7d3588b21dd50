"""What the workers of a group know of each other: the real directory of statuses, and each one's books of forwards."""

from __future__ import annotations

from collections.abc import Iterable

from relaygr_stream.lab.simulate.timeline import Clock
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.fleet import OwnerDirectory
from relaygr_stream.worker.commands import Answer
from relaygr_stream.worker.forwarding import Forwarding, Kept, instead


class Peers:
    """What all workers of a group know of each other, and each one's books of what it sent to whom."""

    def __init__(self, settings: Settings, names: Iterable[str], lanes: int, clock: Clock, seed: int) -> None:
        self.owners = OwnerDirectory(settings.client.silence_ms, clock=clock)
        self._now = Clock()  # that of the answer in hand, which may leave at the end of a turn
        self._home: dict[str, int] = {}
        self._of = {
            name: Forwarding(name, self.owners, lanes, self._now, seed + index, self._home.__getitem__)
            for index, name in enumerate(names)
        }

    def refused(self, name: str, answer: Answer, home: int, now: float) -> int | Kept | None:
        """As `instead`, by this worker's books. home: the lane of the user."""
        if answer.status != "overloaded":
            return None
        self._now.now = now
        self._home[answer.task.user_id] = home
        return instead(self._of[name], answer, now)
