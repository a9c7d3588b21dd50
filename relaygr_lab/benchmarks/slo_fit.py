"""What a simulation of a `relaygr bench slo` probe is given: the costs and latencies that were measured in that probe.

How an operation's cost depends on its size is `costs`, calibrated by themselves; how long operations took in the probe
is its device time as worker-status counted it, their noise the P50 and P99 of its device stage. Ways of messages are
the quantiles of its bus stages, each with what client and worker take around it. Nothing here is fitted to a latency
that is compared afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, median
from typing import Any, Final

import msgspec
from relaygr_lab.simulate.bus import Z99, BusLatency
from relaygr_lab.simulate.costs import DeviceCosts

from relaygr_stream.engine.build import DELAY_SLO_SHARE
from relaygr_stream.engine.executor import SLICE_SHARE
from relaygr_stream.settings.schema import Settings

Probe = dict[str, Any]
#: Quantiles of a log-normal factor, from one in a thousand on.
QUANTILES: Final = 101
#: Up to this share of requests that computed something besides their score, the device stage's P99 is a score's.
PURE: Final = 0.01


def relayed(probe: Probe) -> bool:
    """Whether requests were announced."""
    return bool(probe["announced"])


class Fit:
    """Of one report. costs: calibrated; probes: those that are compared; traffic: the report's conditions."""

    def __init__(
        self, costs: DeviceCosts, settings: Settings, probes: Sequence[Probe], traffic: dict[str, Any]
    ) -> None:
        self._costs = costs
        self._traffic = traffic
        self._rows = traffic["suffix"] + traffic["candidates"]
        bound_ms = settings.worker.max_ranking_delay_ms or DELAY_SLO_SHARE * settings.relay.slo_ms
        self._chunk_ms = SLICE_SHARE * bound_ms * costs.steps
        full = [probe for probe in probes if probe["mode"] == "full"]
        relays = [probe for probe in probes if relayed(probe)]
        self._score_sigma = median(_sigma(probe) for probe in [one for one in relays if _pure(one)] or relays)
        took_ms = median(probe["stages"]["device"]["p50"] for probe in full)
        self._extend_sigma = median(map(_sigma, full)) / _evened_out(took_ms, costs.lasting_ms)
        # From a request's reading to the device where nothing is in the way, and from the device to its answer.
        self._taken_in_ms = min(probe["stages"]["queued"]["p50"] for probe in probes)
        self._answer_ms = max(0.0, median(one["stages"]["between"]["p50"] for one in relays) - costs.step_ms)
        self._extending = median(self._slower(probe)[0] for probe in relays if not _recomputes(probe))

    def costs(self, probe: Probe) -> DeviceCosts:
        """As long as operations took in this probe."""
        extending, scoring = self._slower(probe)
        if _recomputes(probe):
            extending = self._extending
        score_sigma = _sigma(probe) if relayed(probe) and _pure(probe) else self._score_sigma
        # Beside rankings, steps of an extension take as long as a score does, and the same things come in between.
        extend_sigma = self._extend_sigma if probe["mode"] == "full" else score_sigma
        e0, e1, e2 = (one * extending / _mean(extend_sigma) for one in self._costs.prefill_ms)
        s0, s1, s2 = (one * scoring / _mean(score_sigma) for one in self._costs.score_ms)
        return msgspec.structs.replace(
            self._costs, prefill_ms=(e0, e1, e2), score_ms=(s0, s1, s2), cold_ms=self._costs.cold_ms * scoring,
            answer_ms=self._answer_ms,
            extend_factors=_factors(extend_sigma), score_factors=_factors(score_sigma),
        )  # fmt: skip

    def ways(self, probe: Probe) -> tuple[BusLatency, BusLatency]:
        """There and back."""
        stages = probe["stages"]
        there = _way(stages["inbound"], stages["sent_late"]["p50"] + self._taken_in_ms)
        return there, _way(stages["outbound"], 0.0)

    def _slower(self, probe: Probe) -> tuple[float, float]:
        """Measured over calibrated device time: of prefixes and what they grow by, of scores."""
        work, length, returning = probe["device_ms_per_s"], probe["length"], probe["revisit"]
        prefix_ms, score_ms = self._prefix_ms(length), self._costs.score([(length, self._rows)])
        if probe["mode"] == "full":
            # Of the requests that were judged: how many others there were is not told. The score finds a warm device.
            took_ms = probe["stage_means"]["device"]
            share = work["full_ms"] / (work["full_ms"] + work["ranking_ms"])
            return share * took_ms / (prefix_ms + self._costs.cold_ms), (1 - share) * took_ms / score_ms
        cold_ms = self._costs.cold_ms * (1 - sum(work.values()) / 1e3)
        grown_ms = self._costs.extend(length, round(self._traffic["growth"]))
        extended_ms = (1 - returning) * prefix_ms + returning * grown_ms + cold_ms
        seconds = probe["seconds"] / self._requests(probe)
        extending = seconds * (work["pre_infer_ms"] + work["full_ms"]) / extended_ms
        return extending, seconds * work["ranking_ms"] / (score_ms + cold_ms)

    def _prefix_ms(self, tokens: int) -> float:
        """Calibrated time of a whole prefix, in chunks as the worker makes them."""
        e0 = self._costs.prefill_ms[0]
        rest = self._costs.extend(0, tokens) - e0
        return rest + e0 * math.ceil(rest / max(e0, self._chunk_ms - e0))

    def _requests(self, probe: Probe) -> float:
        """Those of the warm-up, too."""
        decided = float(sum(probe["decisions"].values()))
        return decided or float(probe["requests"] + probe["rate"] * self._traffic["warm_up_s"])


def _recomputes(probe: Probe) -> bool:
    """Whether what returning users have is evicted for good, so that the share of new prefixes is not known."""
    return bool(probe["mode"] == "relay-hbm")


def _pure(probe: Probe) -> bool:
    others = sum(count for outcome, count in probe["outcomes"].items() if outcome in ("joined", "full"))
    return bool(others <= PURE * probe["requests"])


def _sigma(probe: Probe) -> float:
    device = probe["stages"]["device"]
    return math.log(device["p99"] / device["p50"]) / Z99


def _evened_out(took_ms: float, lasting_ms: float) -> float:
    """Spread of the mean of a noise that lasts so long over such a time, in parts of the noise's own."""
    if not lasting_ms:
        return 1.0
    parts = lasting_ms / took_ms
    return math.sqrt(2 * parts * (1 - parts * (1 - math.exp(-1 / parts))))


def _mean(sigma: float) -> float:
    return math.exp(sigma * sigma / 2)


def _factors(sigma: float) -> tuple[float, ...]:
    """Of a log-normal law."""
    normal = NormalDist()
    ends = 1 / (10 * QUANTILES)
    shares = (min(1 - ends, max(ends, at / (QUANTILES - 1))) for at in range(QUANTILES))
    return tuple(math.exp(sigma * normal.inv_cdf(share)) for share in shares)


def _way(stage: dict[str, float], around_ms: float) -> BusLatency:
    return BusLatency(stage["p50"] + around_ms, stage["p99"] + around_ms)
