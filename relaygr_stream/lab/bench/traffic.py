"""The requests of a probe: users of one length who return with grown histories, at Poisson times.

Knows nothing of modes, nor of what becomes of the requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import msgspec
import numpy as np

from relaygr_stream.lab.workload.generator import Generator, GeneratorOptions
from relaygr_stream.lab.workload.items import StageDelay, WorkItem
from relaygr_stream.wire.messages import RankingRequest, RequestEvent

#: New users are drawn from so many that one is hardly ever drawn twice: with 1,000 known, once in 200 requests.
USERS: Final = 200_000


@dataclass(frozen=True, kw_only=True)
class TrafficOptions:
    """What the requests of all probes have in common."""

    items: int  # ids of the model's item table
    suffix: int
    candidates: int
    growth: float  # mean new behaviours of a returning user
    recent: int  # a return is by a user of one of this many requests before
    strangers: int  # users known before anyone returns
    sigma: float  # of log-normal lengths; 0: all the same
    max_prefix: int
    delay: StageDelay
    seed: int


class Population:
    """Users with a history of `length` behaviours or a little more, who live on from probe to probe.

    What their workers keep of them lives on, too, as in a service that runs for long: probes of returning users do not
    start with cold caches. Users of two populations are never the same.
    """

    def __init__(self, name: str, length: int, revisit: float, options: TrafficOptions) -> None:
        self.name = name
        self.length = length
        self.revisit = revisit
        self._rng = np.random.default_rng([options.seed, *name.encode()])
        generator = Generator(
            GeneratorOptions(
                seed=int(self._rng.integers(2**31)),
                users=USERS,
                user_exponent=0.0,
                items=options.items,
                length_median=length + options.suffix,
                length_sigma=options.sigma,
                revisit=revisit,
                recent=options.recent,
                strangers=options.strangers,
                growth=options.growth,
                suffix=options.suffix,
                candidates=options.candidates,
                max_prefix=options.max_prefix,
                delay=options.delay,
                run=f"{name}-",
            )
        )
        self._requests = iter(generator)
        self._waiting: WorkItem | None = None

    def take(self, rate: float, *, count: int, since: float = 0.0, until: float = 0.0) -> list[WorkItem]:
        """The next requests, due at Poisson times with `rate` a second from now on.

        So many that at least `count` are due after `since` and the last is due after `until` (seconds from now).
        """
        taken: list[WorkItem] = []
        counted = 0
        for item in self.stream(rate):
            if counted >= count and item.at >= until:
                self._waiting = item  # nobody knows of it yet: the next one's
                return taken
            taken.append(item)
            counted += item.at >= since
        raise AssertionError("a stream has no end")

    def stream(self, rate: float, after: float = 0.0) -> Iterator[WorkItem]:
        """The same without an end, made as they are asked for; the first is due after `after`."""
        at = after
        while True:
            at += float(self._rng.exponential(1 / rate))
            waiting, self._waiting = self._waiting, None
            yield replace(waiting or self._next(), at=at)

    def _next(self) -> WorkItem:
        item = next(self._requests)
        user = f"{self.name}-{item.event.user_id}"
        return replace(item, event=_of_user(item.event, user), request=_of_user(item.request, user))


M = TypeVar("M", RequestEvent, RankingRequest)


def _of_user(message: M, user: str) -> M:
    return msgspec.structs.replace(message, user_id=user)
