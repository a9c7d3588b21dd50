"""A scenario: fleet, traffic, bus, faults, and its requests. Plain values, which can be sent to other processes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, Literal

from relaygr_lab.policies import Policy, Route
from relaygr_lab.simulate.bus import BusLatency
from relaygr_lab.simulate.costs import DeviceCosts
from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.schema import Settings
from relaygr_stream.trigger.decision import Reason
from relaygr_stream.wire.messages import Outcome, Status
from relaygr_stream.workload.traffic import Traffic

#: relay: events, signals, reuse. cache: prefix KV kept after ranking, no events. full: every ranking inferred in full.
Mode = Literal["relay", "cache", "full"]

#: A fleet of so many workers is simulated whole, as one group, where all of it is asked for.
WHOLE: Final = 50
#: Most workers in a group of a larger fleet: few, so that a small sample uses all cores. Forwarding looks at 16 peers.
GROUP: Final = 20
#: Most workers in a group with a failure: enough that a share of 2 % is one worker.
FAILING_GROUP: Final = 50
#: Least workers with a failure: one dies, and one gets its lanes.
SURVIVORS_AND_DEAD: Final = 2


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A share of the workers dies at once, `at` seconds into the measured time."""

    share: float
    at: float

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ConfigError(f"fail-rack = {self.share:g}: must be a share of the workers above 0 and below 1")
        if not 0 <= self.at < math.inf:
            raise ConfigError(f"at = {self.at:g} s: must be at least 0")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A fleet under traffic. workers: the fleet's; sample: how many of them are simulated."""

    settings: Settings
    costs: DeviceCosts
    traffic: Traffic
    workers: int
    lanes_per_worker: int = 8
    sample: int = 2 * GROUP
    seconds: float = 30.0  # measured
    warm_s: float = 60.0  # before that: caches fill, nothing is counted
    mode: Mode = "relay"
    route: Route = "owner"  # where clients send rankings
    policy: Policy = "relay"
    hot: float = 0.0  # share of the users who are all on the first lane of their group
    unranked: float = 0.0  # share of the requests that their client cancels when they would be ranked
    bus: BusLatency = field(default_factory=BusLatency)
    answers: BusLatency | None = None  # from the worker back to the client; None: as `bus`
    status_loss: float = 0.0  # share of worker statuses that never arrive
    failure: Failure | None = None
    seed: int = 7

    def __post_init__(self) -> None:
        if self.workers < 1 or self.sample < 1 or self.lanes_per_worker < 1:
            raise ConfigError("workers, sample and lanes per worker must be at least 1")
        if not (0 < self.seconds < math.inf and 0 <= self.warm_s < math.inf):
            raise ConfigError(f"seconds = {self.seconds:g} must be above 0, warm-up = {self.warm_s:g} s at least 0")
        if not 0 <= self.status_loss < 1:
            raise ConfigError(f"status-loss = {self.status_loss:g}: must be a share below 1")
        for name in ("hot", "unranked"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name):g}: must be a share below 1")
        if self.failure is not None:
            if self.failure.at >= self.seconds:
                raise ConfigError(
                    f"at = {self.failure.at:g} s: must lie within the {self.seconds:g} s that are measured"
                )
            if self.workers < SURVIVORS_AND_DEAD:
                raise ConfigError(
                    f"fail-rack = {self.failure.share:g} with workers = {self.workers:,}: "
                    f"there must be at least two workers, one of which takes the other's lanes over"
                )

    @property
    def groups(self) -> list[Group]:
        """The sample in groups of nearly equal size, at most GROUP workers each, which are simulated separately.

        A fleet of at most WHOLE workers is one group: its workers forward to each other. With a failure, the sample is
        large enough for one dead worker to be its share.
        """
        sample, share = self.sample, 0.0 if self.failure is None else self.failure.share
        if share:
            sample = max(SURVIVORS_AND_DEAD, sample, round(1 / share))
        sample = min(sample, self.workers)
        count = -(-sample // (FAILING_GROUP if share else GROUP))
        if sample == self.workers <= WHOLE and self.settings.worker.forward:
            count = 1
        sizes = [sample // count + (index < sample % count) for index in range(count)]
        ends = list(accumulate(sizes))
        dead = [0, *(round(share * end) for end in ends)]
        if share:
            dead[-1] = max(1, dead[-1])
        return [
            Group(index, end - size, size, min(size - 1, dead[index + 1] - dead[index]))
            for index, (end, size) in enumerate(zip(ends, sizes, strict=True))
        ]


@dataclass(frozen=True)
class Group:
    """Workers first … first + size − 1 of the fleet, with their lanes."""

    index: int
    first: int
    size: int
    dead: int  # that many of them die at the failure


@dataclass(slots=True, eq=False)
class Request:
    """A request. Times are seconds. Until it completes, latency is infinite and status None."""

    number: int
    at: float  # its event
    rank_at: float
    user: int
    life: int
    lane: int
    prefix: int
    returning: bool  # the user's history was there before
    long: bool  # one of the traffic's long users
    ranked: bool = True  # False: its client cancels it at rank_at
    reason: Reason | None = None  # the trigger's decision
    latency_s: float = math.inf  # from rank_at to the client's scores
    status: Status | None = None  # of the answer; None: none came in time
    outcome: Outcome | None = None
    sent_to: str = ""  # the worker that its client chose, until there is an answer
    hops: int = 0  # times it had been forwarded when it was answered
    answers: int = 0

    @property
    def name(self) -> str:
        """Its request id."""
        return f"s{self.number}"

    @property
    def user_id(self) -> str:
        """Its user id."""
        return f"u{self.user}.{self.life}"


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A ranking on its way to a lane: by its client, or by a worker that refused it. The origin of its task."""

    request: Request
    lane: int
    at: float
    timeout_ms: float  # from then on
    hops: int

    @property
    def record(self) -> Sent:
        """What is done once it has its answer."""
        return self
