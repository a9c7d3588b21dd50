"""What workers and clients of a simulated group know of the workers: the real directory of statuses, and their books.

A worker has its books of forwards, and knows where the prefix KV of delegated requests are. Clients know what they sent
to whom and have no answer to.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Final

from relaygr_lab.policies import Route
from relaygr_lab.simulate.scenario import Request
from relaygr_lab.simulate.timeline import Clock
from relaygr_stream.engine.commands import Answer
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.fleet import OwnerDirectory
from relaygr_stream.worker.forwarding import MOST_HOPS, Forwarding, WhyKept, instead


class Peers:
    """What all workers of a group know of each other, and each one's books of what it sent to whom."""

    def __init__(self, settings: Settings, names: list[str], lanes: int, clock: Clock, seed: int) -> None:
        self.owners = OwnerDirectory(settings.client.silence_ms, clock=clock)
        self._forwards = settings.worker.forward
        self._now = Clock()  # that of the answer in hand, which may leave at the end of a turn
        self._home: dict[str, int] = {}
        self._of = {
            name: Forwarding(
                name, self.owners, lanes, self._now, seed + index, self._home.__getitem__, settings.relay.averaging
            )
            for index, name in enumerate(names)
        }

    def refused(self, name: str, answer: Answer, home: int, now: float) -> int | WhyKept | None:
        """As `instead`, by this worker's books. home: the lane of the user."""
        if answer.status != "overloaded":
            return None
        if answer.rank.pass_to is not None:
            return answer.rank.pass_to
        if not self._forwards:
            return None
        self._now.now = now
        self._home[answer.task.user_id] = home
        return instead(self._of[name], answer, now)

    def pass_to(self, name: str, request: Request, hops: int, left_ms: float) -> int | None:
        """A lane of the worker that has this ranking's prefix KV on the behalf of worker `name`, as far as it knows."""
        if not request.delegate or hops:
            return None
        return self._of[name].lane_of_delegate(request.delegate, left_ms)


class Routes:
    """Where clients send rankings: RoutedClient's choices (lab/bench/routing.py). lanes: worker → its lanes."""

    def __init__(self, route: Route, seed: int) -> None:
        self._route: Final = route
        self._random = random.Random(seed)
        self._waiting: Counter[str] = Counter()

    def place(self, request: Request, lanes: Mapping[str, frozenset[int]]) -> tuple[int, int]:
        """The lane, and the hops that the ranking states."""
        if self._route == "owner":
            return request.lane, 0
        if self._route == "lane":
            return request.lane, MOST_HOPS
        names = [name for name, owned in lanes.items() if owned]
        self._random.shuffle(names)
        chosen = min(names, key=self._waiting.__getitem__) if self._route == "least" else names[0]
        self._waiting[chosen] += 1
        request.sent_to = chosen
        return self._random.choice(sorted(lanes[chosen])), MOST_HOPS

    def answered(self, request: Request) -> None:
        """A client has its answer."""
        if request.sent_to:
            self._waiting[request.sent_to] -= 1
            request.sent_to = ""
