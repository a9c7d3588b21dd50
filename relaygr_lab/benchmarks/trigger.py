"""The trigger: how well costs are predicted, what a decision takes, how many events a second one process
sustains; and whether its choice is worth something (trigger_regimes.py).

python relaygr_lab/benchmarks/trigger.py        prints the tables; CHECK=1: non-zero, bounds not kept
trigger.py PART…                                only costs, decision, rate or regimes
The last table runs the real `relaygr trigger` on Apache Kafka where KAFKA_HOME names one, else on the embedded broker.
"""

from __future__ import annotations

import argparse
import logging
import os
import time

import numpy as np
from judge import judge
from relaygr_lab.verdicts import NotValid
from trigger_costs import CASES, WARM_UP, in_hindsight, measure, predict
from trigger_rate import Mix, Rate, measure_rates
from trigger_regimes import measure as measure_regimes

from relaygr_stream.fleet import Claim
from relaygr_stream.ops.brokers.local import broker_at_hand
from relaygr_stream.settings.schema import Settings
from relaygr_stream.trigger.decision import LaneState, Policy, decide
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.messages import CostModel, LaneStatus, RequestEvent, WorkerStatus
from relaygr_stream.workload.quantiles import nearest_rank

MEDIAN_ERROR = 0.15
DECISION_US = 20.0
EVENTS_PER_S = 20_000.0
#: The relay's largest rate, or goodput, against that of one whose trigger chooses.
LEAST_RATIO = 0.97
#: The events a second are asked of events up to this many behaviours with a tenth admitted: beyond, what a process can
#: read at all (the floor) and the cost of sending the same bytes on are what counts. All sizes are printed.
JUDGED_TOKENS = 512
MEASURE_S = float(os.environ.get("MEASURE_S", "40"))

broken: list[str] = []


def check(holds: bool, what: str) -> None:
    if not holds:
        broken.append(what)


def costs() -> None:
    settings = Settings()
    requests, chunk_ms = measure(settings, MEASURE_S)
    if len(requests) < 3 * WARM_UP:
        raise NotValid(f"only {len(requests)} requests in {MEASURE_S:g} s: set MEASURE_S to more")
    lengths = sorted(request.prefix for request in requests)
    print(
        f"Predicted device time against measured, {len(requests)} full inferences of {lengths[0]}…{lengths[-1]} tokens "
        f"(median {lengths[len(lengths) // 2]}), {settings.model.layers} layers, D = {settings.model.dim}, "
        f"{settings.worker.dtype}, {settings.worker.threads} thread\n"
    )
    print(f"{'':34} {'full inference':>23} {'prefix':>23}")
    print(f"{'what is learnt from':34} {'median':>8} {'P95':>7} {'bias':>6} {'median':>8} {'P95':>7}")
    for case in CASES:
        errors = predict(requests, case, chunk_ms)
        median = float(np.median(errors.full))
        print(
            f"{case.name:34} {median:8.1%} {nearest_rank(errors.full, 0.95):7.1%} {errors.bias:+6.1%} "
            f"{np.median(errors.prefix):8.1%} {nearest_rank(errors.prefix, 0.95):7.1%}"
        )
        check(
            median <= MEDIAN_ERROR,
            f"prediction, {case.name}: median error {median:.1%}; bound: at most {MEDIAN_ERROR:.0%}",
        )
    floor = in_hindsight(requests)
    print(f"{'best coefficients in hindsight':34} {np.median(floor):8.1%} {nearest_rank(floor, 0.95):7.1%}\n")


def decision() -> None:
    policy = Policy.from_settings(Settings())
    lane = LaneState(policy)
    status = LaneStatus(lane=0, budget_bytes=1 << 50, pinned_bytes=0, pre_infer_offset=0)
    worker = WorkerStatus(
        name="w", incarnation=1, host="h", pid=1, sent_ms=1, state="serving", lanes=(status,),
        costs=CostModel(c0=1.0, c1=0.01, c2=1e-5, c3=3e-5), bytes_per_token=4096, alloc_bytes=262_144, queue_ms=1.0,
        model_version="m",
    )  # fmt: skip
    owner = Claim(worker, status, 0.0)
    print(f"{'one decision, booking included':34} {'median':>8} {'P99':>8}  µs")
    for reason, tokens in (("too_long", policy.max_prefix_tokens + 1), ("admitted", 2000)):
        prefix = Behaviours.from_arrays(np.arange(tokens), np.zeros(tokens, np.uint8), np.arange(tokens))
        taken = []
        for number in range(20_000):
            event = RequestEvent(request_id=f"{reason}-{number}", user_id="u", prefix=prefix, candidates=100)
            now_s = number * 1e-4
            start = time.perf_counter()
            lane.observe(owner)
            decided = decide(event, lane, age_ms=0.0, now_s=now_s)
            if decided.admit:
                lane.book(event, decided, now_s)
            taken.append((time.perf_counter() - start) * 1e6)
            assert decided.reason == reason, decided
        median = float(np.median(taken))
        print(f"{reason:34} {median:8.2f} {nearest_rank(taken, 0.99):8.2f}")
        check(median <= DECISION_US, f"decision, {reason}: median {median:.1f} µs; bound: at most {DECISION_US} µs")
    print()


def rate() -> None:
    kind = broker_at_hand()
    mixes = [
        Mix(64, 0.1, 100_000),
        Mix(512, 0.0, 60_000),
        Mix(512, 0.1, 60_000),
        Mix(512, 0.5, 40_000),
        Mix(512, 1.0, 30_000),
        Mix(2000, 0.0, 20_000),
        Mix(2000, 0.1, 20_000),
    ]
    print(f"Events a second that one `relaygr trigger` decides on, on one core, {kind} broker on the other\n")
    print(
        f"{'behaviours':>10} {'bytes':>7} {'admitted':>8} {'events/s':>9} {'MB/s':>6} {'CPU µs':>7}"
        f"{'only reading: events/s':>24} {'CPU µs':>7}"
    )

    def show(each: Rate) -> None:
        mix = each.mix
        print(
            f"{mix.tokens:10} {each.event_bytes:7} {mix.admitted:8.0%} {each.per_second:9,.0f} "
            f"{each.per_second * each.event_bytes / 1e6:6.0f} {each.cpu_us:7.1f}"
            f"{each.floor_per_second:24,.0f} {each.floor_cpu_us:7.1f}"
        )
        if mix.tokens <= JUDGED_TOKENS and mix.admitted <= 0.1:
            what = f"{mix.tokens} behaviours, {mix.admitted:.0%} admitted"
            check(
                each.per_second >= EVENTS_PER_S,
                f"rate, {what}: {each.per_second:,.0f} events/s; bound: at least {EVENTS_PER_S:,.0f}",
            )

    measure_rates(kind, mixes, show)


def regimes() -> None:
    for name, found in measure_regimes().items():
        ratio = found["relay"] / found["risk"]
        check(
            ratio >= LEAST_RATIO,
            f"regime {name}: {ratio:.2f} of a trigger that chooses; bound: at least {LEAST_RATIO:g}",
        )


def main() -> list[str]:
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # topics made a moment ago have no leaders yet
    parts = {"costs": costs, "decision": decision, "rate": rate, "regimes": regimes}
    parser = argparse.ArgumentParser(description="The trigger: its costs, decisions, events a second, and choice.")
    parser.add_argument("parts", metavar="PART", nargs="*", help=f"{', '.join(parts)}; all by default")
    chosen = parser.parse_args().parts
    if unknown := [name for name in chosen if name not in parts]:
        parser.error(f"unknown part {unknown[0]!r}: one of {', '.join(parts)}")
    for name in chosen or parts:
        parts[name]()
    return broken


if __name__ == "__main__":
    judge(main)
