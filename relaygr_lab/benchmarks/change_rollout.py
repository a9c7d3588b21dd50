"""A new model for a fleet: a rollout, with and without prefill of those who move, restarts, and a rollout in place.

One fleet under one load plays the first three in turns; first one of emulated devices, then one of the real engine on
this processor, which computes. Another one of those, with hand-over, is rolled out in place: in restarts a new model's
workers take no prefix KV of the former one's. Hits are means of WINDOW rankings in a row.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from relaygr_lab.emulate.process import FACTORY, MODULE
from relaygr_lab.rollouts import NEXT, WINDOW, Change, ChangingFleet, Traffic
from relaygr_lab.verdicts import NotValid, above_0

from relaygr_stream.errors import RelayError
from relaygr_stream.ops.brokers.local import broker_at_hand, local_broker
from relaygr_stream.ops.rollout.run import Plan
from relaygr_stream.settings.schema import Kafka, Relay, Settings
from relaygr_stream.settings.worker import Handover, Model, Worker

COSTS: Final = Path(__file__).parent.parent / "relaygr_lab" / "emulate" / "costs" / "cpu.toml"
LANES: Final = 16
TOKENS: Final = 700  # on an emulated device 25 ms of full inference, and 2 ms with prefix KV
#: Of the real engine: a model so small that two cores carry six processes, and its users, of 0.5 MiB each.
REAL: Final = Model(layers=2, dim=64, heads=2, dqk=32, dv=32, vocab=20_000)
REAL_TRAFFIC: Final = Traffic(users=200, rate=30.0, tokens=500)
BEFORE_S: Final = 8.0
#: Of the hits before, at the least while the users move.
LEAST_HITS: Final = 0.8
#: P99 through a rollout, against that of plain restarts.
P99: Final = 1.0


def report(changes: Sequence[Change]) -> list[str]:
    """Print them; returns the bounds not kept."""
    print(
        f"{'change':<18} {'hits before':>11} {'least':>7} {'below 0.9':>10} {'P99 before':>11} {'P99':>9} {'lost':>6}"
    )
    for each in changes:
        print(
            f"{each.name:<18} {each.before:>11.0%} {each.least:>6.2f}× {each.below_s:>8.1f} s "
            f"{each.p99_before_ms:>8.0f} ms {each.p99_ms:>6.0f} ms {each.lost:>3} of {each.rankings}"
        )
    warm, _, restarts, *_ = changes
    for each in changes:
        if each.rankings < WINDOW:
            raise NotValid(f"{each.name}: {each.rankings} rankings, too few for a mean of {WINDOW}")
    rolled = [each for each in changes if each is not restarts]
    broken = [f"{each.name}: {each.lost} rankings lost; bound: none" for each in rolled if each.lost]
    if warm.least < LEAST_HITS:
        broken.append(f"rollout: hits fell to {warm.least:.2f} of those before; bound: at least {LEAST_HITS:g}")
    if warm.p99_ms > P99 * above_0(restarts.p99_ms, "P99 with restarts"):
        broken.append(f"rollout: P99 {warm.p99_ms:.0f} ms; bound: {P99:g} × {restarts.p99_ms:.0f} ms with restarts")
    return broken


async def play(fleet: ChangingFleet, plan: Plan) -> list[Change]:
    """Both rollouts, there and back, then restarts."""
    changes = []
    for name, to, warm in (("rollout", NEXT, True), ("rollout --cold", "", False)):
        if to != NEXT:  # its workers still have their users' prefix KV
            await fleet.stop(to)
        await fleet.start(to)
        before_s, began_s = await usual()
        await fleet.roll_out(to, plan, warm=warm)
        changes.append(fleet.change(name, began_s, before_s))
    await asyncio.sleep(BEFORE_S)  # those who were cold return
    before_s, began_s = await usual()
    await fleet.restart("")
    await asyncio.sleep(BEFORE_S)
    changes.append(fleet.change("restarts", began_s, before_s))
    return changes


async def play_in_place(fleet: ChangingFleet, plan: Plan) -> list[Change]:
    """One rollout, without other processes."""
    before_s, began_s = await usual()
    await fleet.roll_out(NEXT, plan, in_place=True)
    return [fleet.change("rollout --in-place", began_s, before_s)]


async def usual() -> tuple[float, float]:
    """The times between which everything is as ever."""
    before_s = time.monotonic()
    await asyncio.sleep(BEFORE_S)
    return before_s, time.monotonic()


async def rollouts(*, quick: bool) -> list[str]:
    """Play the fleets, print their tables, and return the bounds not kept."""
    plan = Plan.from_shares([0.25, 0.5, 1.0], 5.0) if quick else Plan.from_shares([0.1, 0.25, 0.5, 1.0], 20.0)
    emulated = Traffic(users=400 if quick else 1500, rate=60.0, tokens=TOKENS)
    model = Model(factory=FACTORY, checkpoint=str(COSTS))
    broken = await judged("emulated devices", [partial(of_fleet, "emulated devices", MODULE, model, emulated, plan)])
    real = partial(of_fleet, "the real engine", "relaygr_stream", REAL, REAL_TRAFFIC, plan)
    in_place = partial(real, play_in_place, Handover(secret="of this bench alone"))
    return broken + await judged("the real engine", [real, in_place])


async def judged(what: str, fleets: Sequence[Callable[[], Awaitable[list[Change]]]]) -> list[str]:
    """The bounds that these do not keep, one after the other."""
    try:
        changes = [change for fleet in fleets for change in await fleet()]
    except RelayError as error:  # the users came back
        return [f"{what}: {error}"]
    return [f"{what}: {each}" for each in report(changes)]


async def of_fleet(
    what: str,
    module: str,
    model: Model,
    traffic: Traffic,
    plan: Plan,
    play: Callable[[ChangingFleet, Plan], Awaitable[list[Change]]] = play,
    handover: Handover = Handover(),  # noqa: B008  (it is frozen)
) -> list[Change]:
    """What users of one fleet saw."""
    kind = broker_at_hand()
    print(
        f"a new model, {what}: {traffic.users} users of {traffic.tokens} tokens, {traffic.rate:g} rankings a second, "
        f"2 workers; hits of {WINDOW} rankings in a row; broker: {kind}"
    )
    settings = Settings(
        kafka=Kafka(partitions=LANES, replication=1, prefix="rollout."),
        # Nothing is refused: what is judged is hits, P99 and what is lost.
        relay=Relay(slo_ms=traffic.timeout_s * 1e3, max_prefix_tokens=1024, max_suffix_tokens=16, max_candidates=64),
        worker=Worker(
            hbm_bytes=4 << 30 if module == MODULE else 256 << 20,
            dram_bytes=256 << 20 if handover.secret else 0,
            audit_share=0.0,
        ),
        model=model,
        handover=handover,
    )
    with tempfile.TemporaryDirectory() as name:
        async with local_broker(kind, folder=Path(name)) as broker:
            settings = msgspec.structs.replace(settings, kafka=broker.kafka_settings(settings.kafka))
            fleet = ChangingFleet(settings, Path(name), traffic, module, print)
            async with fleet.serving():
                return await play(fleet, plan)
