"""How busy a device may be: the largest utilisation at which it keeps an SLO, by simulating its queue.

Requests are announced at random (Poisson). Each brings a prefix, to be computed until its ranking comes lead_ms later,
and that ranking. The order is the scheduler's: rankings first, each with what its prefix still lacks; else prefixes by
due time, in slices that no ranking interrupts. Times are log-normal. It knows neither batches nor other devices.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Final, NamedTuple

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
#: these, 9 % (six pairs of times, from a GPU's to a processor's; six seeds). One takes some 0.2 s of a processor.
REQUESTS: Final = 16_000
#: The first share is not judged: the queue begins empty.
SETTLING: Final = 0.1
SEED: Final = 1
#: Of the bracket: to 0.011.
HALVINGS: Final = 6
#: Device times and their variations are rounded to steps of this factor: what is measured wanders, and one utilisation
#: serves all that is within a step.
TIME_STEP: Final = 1.03
VARIATION_STEP: Final = 1.2
#: Of either, as good as 0: a microsecond, or times that are all alike.
NOTHING: Final = 1e-3


class Work(NamedTuple):
    """Device time of a request's prefix, or score. variation: the squared coefficient of variation."""

    mean_ms: float
    variation: float

    def rounded(self) -> Work:
        """To whole steps."""
        return Work(_rounded(self.mean_ms, TIME_STEP), _rounded(self.variation, VARIATION_STEP))

    def times(self, normal: list[float]) -> list[float]:
        """Of each request. normal: values of the standard normal distribution."""
        variance = math.log1p(self.variation)
        sigma = math.sqrt(variance)
        return [self.mean_ms * math.exp(sigma * each - variance / 2) for each in normal]


def utilisation(prefix: Work, score: Work, lead_ms: float, slo_ms: float) -> float:
    """The largest one, from LEAST_USE to MOST_USE, at which 99 of 100 rankings are answered within slo_ms, which
    is above 0, the way of request and answer included."""
    return _utilisation(prefix.rounded(), score.rounded(), lead_ms, slo_ms)


@lru_cache(maxsize=4096)
def _utilisation(prefix: Work, score: Work, lead_ms: float, slo_ms: float) -> float:
    gaps, normal, other = _draws(REQUESTS, SEED)
    prefixes, scores = prefix.times(normal), score.times(other)
    within_ms = max(slo_ms / 2, slo_ms - BUS_MS)
    begin = int(SETTLING * len(gaps))
    allowed = int(ALLOWED_LATE * (len(gaps) - begin))
    mean_ms = (sum(prefixes) + sum(scores)) / len(gaps)
    low, high = LEAST_USE, MOST_USE
    for _ in range(HALVINGS):
        use = (low + high) / 2
        announced = list(itertools.accumulate(gap * mean_ms / use for gap in gaps))
        took_ms = answered(announced, prefixes, scores, lead_ms, SLICE * slo_ms)
        late = (took for took in itertools.islice(took_ms, begin, None) if took > within_ms)
        too_many = next(itertools.islice(late, allowed, None), None)
        low, high = (use, high) if too_many is None else (low, use)
    return low


def answered(
    announced: Sequence[float], prefixes: Sequence[float], scores: Sequence[float], lead: float, piece: float
) -> Iterator[float]:
    """The time from each ranking to its answer, on one device. All times in one unit.

    announced: when; the ranking comes `lead` later. prefixes, scores: work. piece: above 0, the longest slice of a
    prefix that a ranking waits for.
    """
    left, job, now = list(prefixes), 0, 0.0
    for number, (came, score) in enumerate(zip(announced, scores, strict=True)):
        ranked = came + lead
        while now < ranked:
            begin = max(now, announced[job]) if job < len(left) else ranked
            if begin >= ranked:
                now = ranked
            elif begin + left[job] <= ranked:
                now = begin + left[job]
                left[job] = 0.0
                job += 1
            else:
                took = min(left[job], math.ceil((ranked - begin) / piece) * piece)
                left[job] -= took
                now = max(ranked, begin + took)
        now += left[number] + score
        left[number] = 0.0
        yield now - ranked


def _rounded(value: float, step: float) -> float:
    """To a power of `step`; what is hardly above 0, to 0."""
    return 0.0 if value < NOTHING else step ** round(math.log(value, step))


@lru_cache(maxsize=1)
def _draws(count: int, seed: int) -> tuple[list[float], list[float], list[float]]:
    """Gaps of a Poisson process of mean 1, and twice standard normal values: quantiles, in an order by chance."""
    chance, even = random.Random(seed), [(number + 0.5) / count for number in range(count)]
    normal = [NormalDist().inv_cdf(each) for each in even]
    found = [-math.log1p(-each) for each in even], normal, normal[:]
    for values in found:
        chance.shuffle(values)
    return found
