"""What a reference in place of a history saves: bytes, events a second of a trigger, and a ranking's time.

    python relaygr_lab/benchmarks/history.py [--events 40000] [--requests 300]
        CHECK=1: exits non-zero, naming the bounds not kept

1. Bytes of a request: its event, its signal and its ranking, with the behaviours and with a reference that states 32
   positions.
2. Events a second of one real `relaygr trigger` (trigger_rate.py), against events that carry 64 behaviours, in turns.
3. Rankings of 2,000 behaviours through a real trigger and a real worker on the embedded broker, by reference and
   carrying all, in turns. The store is a `redis-server` where there is one, else SQLite.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from judge import judge
from msgspec import UNSET
from relaygr_lab.processes import servable
from relaygr_lab.verdicts import above_0
from trigger_rate import Mix, Rate, measure_rates

from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.client import RelayClient
from relaygr_stream.errors import RelayError
from relaygr_stream.history.store import WritableStore, open_store
from relaygr_stream.ops.brokers.distribution import free_ports
from relaygr_stream.ops.brokers.local import broker_at_hand, local_broker
from relaygr_stream.ops.children import Child, stop_all, write_settings
from relaygr_stream.settings.schema import Client, History, Kafka, Relay, Settings
from relaygr_stream.settings.worker import Model, Worker
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.history import HistoryReference
from relaygr_stream.wire.messages import HITS, PreInferSignal, RankingRequest, RequestEvent, with_version
from relaygr_stream.workload.quantiles import nearest_rank

LENGTHS: Final = (64, 512, 2_000, 10_000)
CANDIDATES: Final = 200
CARRIED: Final = 64
RATE_SHARE: Final = 0.9
ADMITTED: Final = (0.0, 0.1, 1.0)
#: A ranking by reference that hits does no more than one that carries all; two halves of one run differ by as much.
MS_SHARE: Final = 1.15
HIT_MARGIN: Final = 0.03
USERS, PREFIX, GROWTH = 24, 2_000, 4
RETRIEVAL_S: Final = 0.12
#: Rankings before those that count: the worker's and the trigger's first predictions.
WARM: Final = 40


def behaviours(length: int, seed: int = 0) -> Behaviours:
    rng = np.random.default_rng(seed)
    return Behaviours.from_arrays(rng.integers(0, 1000, length), np.zeros(length, np.uint8), np.arange(length) * 1000)


def sizes() -> list[str]:
    broken = []
    print(f"1. Bytes of a request (event + signal + ranking, {CANDIDATES} candidates)\n")
    print(f"{'behaviours':>10} {'carrying all':>13} {'by reference':>13} {'ratio':>7}")
    for length in LENGTHS:
        whole = behaviours(length)
        reference = HistoryReference.from_behaviours(whole, 7, range(max(0, length - 32), length))
        carried, referred = (
            sum(len(encode(message)) for message in messages(prefix, history))
            for prefix, history in ((whole, None), (Behaviours(), reference))
        )
        print(f"{length:>10,} {carried:>13,} {referred:>13,} {carried / referred:>7.1f}")
        if length >= PREFIX and referred > carried / 10:
            broken.append(
                f"a reference to {length} behaviours takes {referred} bytes; bound: a tenth of {carried}, carried"
            )
    return broken


def messages(
    prefix: Behaviours, history: HistoryReference | None
) -> tuple[RequestEvent, PreInferSignal, RankingRequest]:
    by = with_version(history or UNSET)
    named: dict[str, Any] = {"request_id": "0123456789abcdef", "user_id": "user-1234"}
    return (
        RequestEvent(**named, prefix=prefix, candidates=CANDIDATES, sent_ms=1 << 40, **by),
        PreInferSignal(**named, prefix=prefix, admitted_ms=1 << 40, life_ms=2000.0, **by),
        RankingRequest(**named, prefix=prefix, candidates=pack_items(range(CANDIDATES)), sent_ms=1 << 40, **by),
    )


def rates(events: int) -> list[str]:
    broken = []
    kind = broker_at_hand()
    print(f"\n2. Events a second of one trigger process ({kind} broker, {events:,} events)\n")
    heads = f"{CARRIED} carried", "2,000 by ref.", "ratio", "10,000 by ref.", "ratio"
    print(f"{'admitted':>8} {heads[0]:>12} {heads[1]:>14} {heads[2]:>6} {heads[3]:>15} {heads[4]:>6}   CPU µs an event")
    mixes = [
        Mix(tokens, admitted, events, by_reference=tokens != CARRIED)
        for admitted in ADMITTED
        for tokens in (CARRIED, 2_000, 10_000)
    ]
    found: list[Rate] = []
    measure_rates(kind, mixes, found.append, floor=False)
    for carried, shorter, longer in zip(found[::3], found[1::3], found[2::3], strict=True):
        ratios = [each.per_second / carried.per_second for each in (shorter, longer)]
        print(
            f"{carried.mix.admitted:>8.0%} {carried.per_second:>12,.0f} {shorter.per_second:>14,.0f} {ratios[0]:>6.2f} "
            f"{longer.per_second:>15,.0f} {ratios[1]:>6.2f}   "
            f"{carried.cpu_us:.1f}, {shorter.cpu_us:.1f}, {longer.cpu_us:.1f}"
        )
        for each, ratio in zip((shorter, longer), ratios, strict=True):
            if ratio < RATE_SHARE:
                broken.append(
                    f"{each.mix.tokens} behaviours by reference, {each.mix.admitted:.0%} admitted: {ratio:.2f} of the "
                    f"rate with {CARRIED} carried; bound: at least {RATE_SHARE}"
                )
    return broken


@dataclass
class Mode:
    """What the rankings of one kind were."""

    ms: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def hits(self) -> float:
        return sum(self.outcomes[each] for each in HITS) / max(1, self.outcomes.total())

    def at(self, percent: float) -> float:
        return nearest_rank(self.ms, percent / 100)


async def rankings(requests: int) -> list[str]:
    modes = {"carrying all": Mode(), "by reference": Mode()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with local_broker("embedded", folder=folder) as broker:
            kafka = broker.kafka_settings(Kafka(prefix="history.", partitions=2))
            await apply_topics(kafka)
            server, store = start_store(folder)
            settings = Settings(
                kafka=kafka,
                relay=Relay(max_prefix_tokens=PREFIX + 2 * requests * GROWTH),
                worker=Worker(hbm_bytes=1 << 30, dram_bytes=0),
                model=Model(layers=2, dim=64, heads=2, dqk=32, dv=32),
                history=store,
                client=Client(timeout_ms=20_000, hedge_ms=0),
            )
            config = write_settings(folder / "settings.toml", servable(settings, folder))
            children = [Child(each, (each, "--config", config), folder) for each in ("trigger", "worker")]
            try:
                await asyncio.gather(*(child.wait_ready() for child in children))
                async with RelayClient(settings=settings) as relay:
                    await play(relay, settings, requests, modes)
            finally:
                await stop_all(children)
                if server is not None:
                    server.terminate()
                    server.wait()
    kind = "Redis" if server is not None else "SQLite"
    print(f"\n3. Rankings of {PREFIX:,} behaviours and more, announced {RETRIEVAL_S * 1e3:.0f} ms before ({kind})\n")
    print(f"{'':>13} {'rankings':>8} {'P50 ms':>7} {'P99 ms':>7} {'hits':>6}  outcomes")
    for title, mode in modes.items():
        times = f"{mode.at(50):>7.2f} {mode.at(99):>7.2f}"
        print(f"{title:>13} {len(mode.ms):>8} {times} {mode.hits:>6.1%}  {dict(mode.outcomes)}")
    carried, referred = modes.values()
    above_0(carried.hits, "the share of hits of rankings that carry all")
    broken = []
    print(f"{'ratio':>13} {'':>8} {referred.at(50) / carried.at(50):>7.2f} {referred.at(99) / carried.at(99):>7.2f}")
    if referred.at(50) > MS_SHARE * carried.at(50):
        broken.append(
            f"P50 by reference {referred.at(50):.2f} ms; bound: {MS_SHARE:g} × {carried.at(50):.2f} ms, carrying all"
        )
    if referred.hits < carried.hits - HIT_MARGIN:
        broken.append(
            f"hits by reference {referred.hits:.1%}; bound: {carried.hits - HIT_MARGIN:.1%}, by those that carry all"
        )
    return broken


async def play(relay: RelayClient, settings: Settings, requests: int, modes: dict[str, Mode]) -> None:
    """Users in turn; each user's requests carry all and refer, in turns, and each history grows between them."""
    store = open_store(settings.history)
    assert isinstance(store, WritableStore)
    await relay.worker_serves(30.0)
    users = {f"user-{number}": behaviours(PREFIX + requests * GROWTH, number) for number in range(USERS)}
    lengths = dict.fromkeys(users, PREFIX)
    for user, whole in users.items():
        await store.replace(user, "", whole.slice(0, PREFIX))
    for number in range(WARM + requests):
        user = f"user-{number % USERS}"
        grown = lengths[user] + GROWTH
        await store.append(user, "", users[user].slice(lengths[user], grown))
        lengths[user] = grown
        title = list(modes)[(number // USERS + number) % 2]
        history = store if title == "by reference" else users[user].slice(0, grown)
        ms, outcome = settings.client.timeout_ms, "none"  # without scores: a miss that took the whole timeout
        with suppress(RelayError):
            async with relay.request(user, history, candidates=CANDIDATES, rank_in=RETRIEVAL_S) as request:
                await asyncio.sleep(RETRIEVAL_S)
                started = time.perf_counter()
                outcome = (await request.rank(range(CANDIDATES))).outcome
            ms = (time.perf_counter() - started) * 1e3
        if number >= WARM:
            modes[title].ms.append(ms)
            modes[title].outcomes[outcome] += 1
    await store.close()


def start_store(folder: Path) -> tuple[subprocess.Popen[bytes] | None, History]:
    if shutil.which("redis-server") is None:
        return None, History(store=f"sqlite:{folder / 'histories'}", timeout_ms=1000.0, max_behaviours=0)
    (port,) = free_ports(1)
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    return server, History(store=f"redis://127.0.0.1:{port}/0", timeout_ms=1000.0, max_behaviours=0)


def main() -> None:
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # topics made a moment ago have no leaders yet
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=40_000)
    parser.add_argument("--requests", type=int, default=300)
    given = parser.parse_args()
    judge(sizes, lambda: rates(given.events), lambda: asyncio.run(rankings(given.requests)))


if __name__ == "__main__":
    main()
