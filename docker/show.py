"""What `make testbed` shows: a few requests as a recommendation service makes them, and the rankings they get.

Runs inside the client's container, beside the load; settings come from its environment.
"""

from __future__ import annotations

import asyncio
import sys
import time
from itertools import islice

import numpy as np
from msgspec.structs import replace

from relaygr_stream.client import RelayClient
from relaygr_stream.errors import RequestError
from relaygr_stream.settings.load import load_settings
from relaygr_stream.workload.generator import Generator, GeneratorOptions

REQUESTS = 8
TOP = 3


async def main() -> int:
    """Announce, retrieve for a while, rank, print; one request after the other. Fails if none was answered."""
    settings = load_settings().settings
    seed, answered = time.time_ns() % 2**32, 0
    options = GeneratorOptions(seed=seed, max_prefix=2048, candidates=50, run=f"show{seed}-")
    async with RelayClient(settings.kafka.bootstrap, settings=settings) as relay:
        for item in islice(Generator(options), REQUESTS):
            user = f"visitor{item.event.user_id.removeprefix('user')}"  # not one of the load's users
            event, request = replace(item.event, user_id=user), replace(item.request, user_id=user)
            await relay.announce(event)
            await asyncio.sleep(0.2)  # retrieval and pre-processing run here
            try:
                ranking = await relay.rank(request, timeout=5)
            except RequestError as error:
                print(f"{user:>12}: {len(request.prefix):4d} behaviours as prefix, {type(error).__name__}: {error}")
                continue
            answered += 1
            items = np.frombuffer(request.candidates, "<u4")
            scores = ranking.scores[:, 0]
            best = np.argsort(-scores)[:TOP]
            print(
                f"{user:>12}: {len(request.prefix):4d} behaviours as prefix, outcome={ranking.outcome:6s} "
                f"{1000 * ranking.latency_s:6.1f} ms, best of {len(items)}:",
                ", ".join(f"item {items[at]} ({scores[at]:.3f})" for at in best),
            )
    return 0 if answered else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
