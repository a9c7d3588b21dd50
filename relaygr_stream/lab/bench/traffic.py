"""The requests of a probe, at Poisson times, by users of one length who return with grown histories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import msgspec
import numpy as np

from relaygr_stream.lab.workload.generator import Generator, GeneratorOptions
from relaygr_stream.lab.workload.items import StageDelay, WorkItem
from relaygr_stream.wire.messages import RankingRequest, RequestEvent

#: Number of users from which new ones are drawn: with 1,000 known, one in 200 draws gives a known user.
USERS: Final = 200_000


@dataclass(frozen=True, kw_only=True)
class TrafficOptions:
    """Options that the requests of all probes share."""

    items: int  # ids of the model's item table
    suffix: int
    candidates: int
    growth: float  # mean new behaviours of a returning user
    recent: int  # a return is by a user of one of the last `recent` requests
    strangers: int  # users that are introduced before any user returns
    sigma: float  # of log-normal lengths; 0: all the same
    max_prefix: int
    delay: StageDelay
    seed: int


class Population:
    """Users with histories of about `length` behaviours, which persist from probe to probe.

    The workers' caches persist, too, as in a long-running service: probes of returning users do not start with cold
    caches. Populations have no user in common.
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
        """The next requests, at Poisson times with `rate` per second from now on.

        At least `count` of them are due after `since`, and the last is due after `until` (seconds from now).
        """
        taken: list[WorkItem] = []
        counted = 0
        for item in self.stream(rate):
            if counted >= count and item.at >= until:
                self._waiting = item  # not sent yet: the next stream begins with it
                return taken
            taken.append(item)
            counted += item.at >= since
        raise AssertionError("a stream has no end")

    def stream(self, rate: float, after: float = 0.0) -> Iterator[WorkItem]:
        """An endless stream of requests, made on demand; the first is due after `after`."""
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
