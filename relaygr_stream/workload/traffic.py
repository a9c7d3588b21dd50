"""What traffic is like: its rate and tide, its users and their returns, the lengths of their histories."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Final

from relaygr_stream.errors import ConfigError
from relaygr_stream.workload.arrivals import ArrivalLog
from relaygr_stream.workload.items import MOST_SIGMA, StageDelay

#: The standard normal distribution as equally likely values.
_NORMALS: Final = [NormalDist().inv_cdf((index + 0.5) / 256) for index in range(256)]


@dataclass(frozen=True)
class Mix:
    """A short majority: this share of the users has `tokens` at the median, the others the traffic's `length`."""

    share: float
    tokens: float

    def __post_init__(self) -> None:
        if not (0 < self.share < 1 and 1 <= self.tokens < math.inf):
            raise ConfigError(
                f"mix = {self.share:g}:{self.tokens:g}: needs a share between 0 and 1, and at least 1 token"
            )


@dataclass(frozen=True)
class Spread:
    """Log-normal lengths, a share of them short, none above `most` tokens."""

    sigma: float
    mix: Mix | None
    most: int

    def powers(self, median: float) -> tuple[float, float]:
        """The means of the length and of its square, where the long users' median is `median`."""
        kinds = [(1.0, median)]
        if self.mix is not None:
            kinds = [(self.mix.share, self.mix.tokens), (1 - self.mix.share, median)]
        first = second = 0.0
        for share, tokens in kinds:
            lengths = [min(self.most, tokens * math.exp(self.sigma * normal)) for normal in _NORMALS]
            first += share * sum(lengths) / len(lengths)
            second += share * sum(length * length for length in lengths) / len(lengths)
        return first, second


@dataclass(frozen=True)
class Tide:
    """The rate swings: rate × (1 + swing · sin(2π t / period))."""

    swing: float
    period_s: float

    def __post_init__(self) -> None:
        if not (0 < self.swing <= 1 and 0 < self.period_s < math.inf):
            raise ConfigError(
                f"tide = {self.swing:g}:{self.period_s:g}: needs a swing above 0, at most 1, and seconds above 0"
            )

    def requests(self, time: float) -> float:
        """Requests until `time` at a mean rate of 1 per second."""
        turn = 2 * math.pi / self.period_s
        return time + self.swing / turn * (1 - math.cos(turn * time))


@dataclass(frozen=True)
class Shift:
    """From `after_s` seconds on, at the mean rate, another share of requests is by returning users."""

    revisit: float
    after_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.revisit < 1 and 0 < self.after_s < math.inf):
            raise ConfigError(f"shift = {self.revisit:g}:{self.after_s:g}: needs a share below 1, and seconds above 0")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The traffic of a whole fleet. Raises ConfigError for a number out of range.

    A log of arrivals gives the times, scaled to `rate`, and the users and their returns where it has users; `users`,
    `zipf`, `revisit`, `shift` and `return_s` then say nothing.
    """

    rate: float  # mean requests per second
    users: int = 1_000_000  # among whom first visits are drawn
    zipf: float = 0.0  # exponent of the law over users; 0: uniform
    revisit: float = 0.5  # share of requests that are returns
    return_s: float = 20.0  # mean time from a request to the return, at the mean rate, while most return
    shift: Shift | None = None
    length: float = 1024.0  # prefix tokens at a user's first request: median of a log-normal law
    sigma: float = 0.0  # of that law
    mix: Mix | None = None
    growth: float = 3.0  # mean new behaviours at a return: 1 + Poisson
    tide: Tide | None = None
    arrivals: ArrivalLog | None = None
    max_prefix: int = 4096
    suffix: int = 8
    candidates: int = 100
    delay: StageDelay = field(default_factory=StageDelay)  # the head start: from the event to the ranking

    def __post_init__(self) -> None:
        for name in ("rate", "users", "return_s", "length", "max_prefix", "candidates"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be above 0, and finite")
        for name in ("zipf", "sigma", "suffix"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 0")
        if self.sigma > MOST_SIGMA:
            raise ConfigError(f"sigma = {self.sigma:g}: must be at most {MOST_SIGMA:g}")
        if not 0 <= self.revisit < 1:
            raise ConfigError(f"revisit = {self.revisit:g}: must be a probability below 1")
        if not 1 <= self.growth <= self.max_prefix:
            raise ConfigError(f"growth = {self.growth:g}: must be within 1…max_prefix ({self.max_prefix})")
        longest = max(self.length, 0 if self.mix is None else self.mix.tokens)
        if longest > self.max_prefix:
            raise ConfigError(f"length = {longest:g}: relay.max_prefix_tokens is {self.max_prefix}")
        if self.returns and longest + self.growth > self.max_prefix:
            raise ConfigError(
                f"length = {longest:g}: a return adds {self.growth:g} tokens, and relay.max_prefix_tokens is "
                f"{self.max_prefix}, so no user could return"
            )
        if self.tide is not None and self.arrivals is not None:
            raise ConfigError("tide: the log of arrivals has its own tide; give one of them")

    @property
    def log_users(self) -> bool:
        """Whether users and returns are those of a log."""
        return self.arrivals is not None and self.arrivals.users is not None

    @property
    def returns(self) -> float:
        """The share of requests that are returns; the larger one, with a shift."""
        if self.arrivals is not None and self.arrivals.users is not None:
            return self.arrivals.returns
        return self.revisit if self.shift is None else max(self.revisit, self.shift.revisit)

    def revisit_at(self, seconds: float) -> float:
        """The share of requests that are returns at that time."""
        return self.revisit if self.shift is None or seconds < self.shift.after_s else self.shift.revisit

    @property
    def pool(self) -> int:
        """Users who are about to return at any moment: by Little's law, returns per second × seconds to a return."""
        return 0 if self.log_users or not self.returns else max(1, round(self.rate * self.returns * self.return_s))

    @property
    def two_kinds(self) -> bool:
        """Whether users are short or long, so that their latencies are worth looking at apart."""
        return self.mix is not None or self.sigma > 0

    def describe(self) -> str:
        """The traffic in words, one fact a line."""
        log = self.arrivals
        if log is not None:
            lines = [f"{log.describe()}; its times, scaled to {self.rate:g} requests/s"]
        elif self.tide is not None:
            lines = [
                f"Poisson arrivals at {self.rate:g} requests/s ± {self.tide.swing:.0%} in {self.tide.period_s:g} s"
            ]
        else:
            lines = [f"Poisson arrivals at {self.rate:g} requests/s"]
        if not self.log_users:
            law = f"Zipf with exponent {self.zipf:g}" if self.zipf else "all alike"
            then = "" if self.shift is None else f", {self.shift.revisit:.0%} from {self.shift.after_s:g} s on"
            lines.append(
                f"users: {self.users:,}, {law}; {self.revisit:.0%} of the requests are returns{then}, after "
                f"{self.return_s:g} s on average"
            )
        short = "" if self.mix is None else f", {self.mix.share:.0%} of the users {self.mix.tokens:g}"
        lines.append(
            f"prefixes: log-normal, median {self.length:g} tokens{short}, sigma {self.sigma:g}, at most "
            f"{self.max_prefix}; a return brings 1 + Poisson({self.growth - 1:g}); once full, the user comes back as a "
            "new one"
        )
        lines.append(f"{self.suffix} suffix tokens, {self.candidates} candidates; {self.delay.describe()}")
        return "\n".join(lines)
