"""How busy a device may be: the largest utilisation at which it keeps the SLOs of all that it serves, by simulation.

Requests of each kind are announced at random (Poisson); each brings a prefix, and its ranking comes lead_ms later.
Times are log-normal. The device is that of device.py.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from statistics import NormalDist
from typing import Final, NamedTuple

from relaygr_stream.ops.planner.device import DeviceLoad, answered

#: Share of late answers that the SLO allows: it is one at P99.
ALLOWED_LATE: Final = 0.01
#: A device that is busier has no time to spare, whatever the simulation says (ops/status/overload.py: BUSY).
MOST_USE: Final = 0.8
#: Less would ask for more than ten workers where one suffices: then the SLO cannot be kept by workers.
LEAST_USE: Final = 0.1
#: Longest part of the SLO that a ranking waits for a slice of pre-inference (worker.max_ranking_delay_ms).
SLICE: Final = 0.2
#: Of the SLO, the way to the worker and back takes so much, half of it at most: 1 ms each way, one in a hundred 5 ms
#: (Apache Kafka, messages of 4 KB).
BUS_MS: Final = 5.0
#: Requests of a queue: with 4,000, utilisations were up to a quarter off, and so were the parts of two scenarios; with
#: these, 9 % (six pairs of times, from a GPU's to a processor's; six seeds). One takes some 0.4 s of a processor.
REQUESTS: Final = 16_000
#: Of a share that is late, which is averaged over a day: one takes some 0.05 s.
FEWER: Final = 8_000
#: The first share is not judged: the queue begins empty.
SETTLING: Final = 0.1
SEED: Final = 1
#: Of the bracket: to 0.011.
HALVINGS: Final = 6
#: Device times and their variations are rounded to steps of this factor: what is measured wanders, and one utilisation
#: serves all that is within a step; one share that is late, all within a COARSE one.
TIME_STEP: Final = 1.03
VARIATION_STEP: Final = 1.2
COARSE: Final = 1.1
#: Of either, as good as 0: a microsecond, or times that are all alike.
NOTHING: Final = 1e-3


class Work(NamedTuple):
    """Device time of a request's prefix, or score. variation: the squared coefficient of variation."""

    mean_ms: float
    variation: float

    def rounded(self, step: float) -> Work:
        """To whole steps."""
        return Work(_rounded(self.mean_ms, step), _rounded(self.variation, VARIATION_STEP))

    def times(self, normal: list[float]) -> list[float]:
        """Of each request. normal: values of the standard normal distribution."""
        variance = math.log1p(self.variation)
        sigma = math.sqrt(variance)
        return [self.mean_ms * math.exp(sigma * each - variance / 2) for each in normal]


class Kind(NamedTuple):
    """The requests of one scenario: so many a second, the work of each, the head start, and the SLO, above 0."""

    per_second: float
    prefix: Work
    score: Work
    lead_ms: float
    slo_ms: float

    @property
    def busy(self) -> float:
        """Devices that it keeps busy."""
        return self.per_second * (self.prefix.mean_ms + self.score.mean_ms) / 1e3

    @property
    def within_ms(self) -> float:
        """Of the SLO, what the way of request and answer leaves."""
        return max(self.slo_ms / 2, self.slo_ms - BUS_MS)

    def rounded(self, of: float, step: float) -> Kind:
        """To whole steps, with a rate relative to this one."""
        prefix, score = self.prefix.rounded(step), self.score.rounded(step)
        return self._replace(per_second=_rounded(self.per_second / of, step), prefix=prefix, score=score)


def utilisation(*kinds: Kind) -> float:
    """The largest one, from LEAST_USE to MOST_USE, at which 99 of 100 rankings of each kind are answered within its
    SLO, the way of request and answer included. Those that are late are answered, too."""
    return _utilisation(_rounded_kinds(kinds, TIME_STEP))


def late(*kinds: Kind, use: float) -> tuple[float, ...]:
    """The share of each kind's rankings that a device refuses which is that busy, because they cannot be within the
    SLO. use: above 0; above 1, it cannot do all."""
    return _late(_rounded_kinds(kinds, COARSE), _rounded(use, COARSE))


@lru_cache(maxsize=4096)
def _utilisation(kinds: Sequence[Kind]) -> float:
    device = _Device(kinds, REQUESTS)
    allowed = [int(ALLOWED_LATE * each) for each in device.judged]
    low, high = LEAST_USE, MOST_USE
    for _ in range(HALVINGS):
        use, found = (low + high) / 2, [0] * len(kinds)
        for kind in device.late(use, refuses=False):
            found[kind] += 1
            if found[kind] > allowed[kind]:
                high = use
                break
        else:
            low = use
    return low


@lru_cache(maxsize=4096)
def _late(kinds: Sequence[Kind], use: float) -> tuple[float, ...]:
    device = _Device(kinds, FEWER)
    found = Counter(device.late(use, refuses=True))
    return tuple(found[kind] / max(1, judged) for kind, judged in enumerate(device.judged))


class _Device:
    """One device, and so many requests of these kinds in proportion to their rates. judged: how many of each are."""

    def __init__(self, kinds: Sequence[Kind], count: int) -> None:
        self._kinds = kinds
        rows: list[tuple[float, float, float, int]] = []
        rate = sum(each.per_second for each in kinds)
        for number, kind in enumerate(kinds):
            gaps, normal, other = _draws(max(1, round(count * kind.per_second / rate)), SEED + number)
            at = (each / kind.per_second for each in itertools.accumulate(gaps))
            rows += zip(at, kind.prefix.times(normal), kind.score.times(other), itertools.repeat(number))
        rows.sort(key=itemgetter(0))
        self._at, self._prefixes, self._scores, self._of = zip(*rows, strict=True)
        self._busy_ms = sum(self._prefixes, sum(self._scores)) / self._at[-1]
        self._begin = int(SETTLING * len(rows))
        counts = Counter(self._of[self._begin :])
        self.judged = [counts[number] for number in range(len(kinds))]

    def late(self, use: float, *, refuses: bool) -> Iterator[int]:
        """The kind of each ranking that is late, at this utilisation. refuses: those that cannot be in time."""
        announced = [self._busy_ms / use * each for each in self._at]
        ranked = [at + self._kinds[of].lead_ms for at, of in zip(announced, self._of, strict=True)]
        within = [each.within_ms for each in self._kinds]
        due = [at + within[of] if refuses else math.inf for at, of in zip(ranked, self._of, strict=True)]
        load = DeviceLoad(announced, ranked, self._prefixes, self._scores, due, self._of)
        for number, took in answered(load, SLICE * min(each.slo_ms for each in self._kinds)):
            if number >= self._begin and took > within[self._of[number]]:
                yield self._of[number]


def _rounded_kinds(kinds: Sequence[Kind], step: float) -> tuple[Kind, ...]:
    return tuple(each.rounded(kinds[0].per_second, step) for each in kinds)


def _rounded(value: float, step: float) -> float:
    """To a power of `step`; what is hardly above 0, to 0."""
    return 0.0 if value < NOTHING else step ** round(math.log(value, step))


@lru_cache(maxsize=16)
def _draws(count: int, seed: int) -> tuple[list[float], list[float], list[float]]:
    """Gaps of a Poisson process of mean 1, and twice standard normal values: quantiles, in an order by chance."""
    chance, even = random.Random(seed), [(number + 0.5) / count for number in range(count)]
    normal = [NormalDist().inv_cdf(each) for each in even]
    found = [-math.log1p(-each) for each in even], normal, normal[:]
    for values in found:
        chance.shuffle(values)
    return found
