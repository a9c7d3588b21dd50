"""Where the clients of a simulated group send their rankings: they know what they sent to whom, with no answer yet."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Final

from relaygr_lab.policies import Route
from relaygr_lab.simulate.scenario import Request
from relaygr_stream.worker.forwarding import MOST_HOPS


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
