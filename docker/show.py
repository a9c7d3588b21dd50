"""What `make testbed` shows: a few requests as a recommendation service makes them, and the rankings they get.

Runs inside the client's container, beside the load; settings come from its environment.
"""

from __future__ import annotations

import asyncio
import time
from itertools import islice

import numpy as np
from msgspec.structs import replace

from relaygr_stream.client import RelayClient
from relaygr_stream.config import load
from relaygr_stream.workload.generator import Generator, GeneratorOptions

REQUESTS = 8
TOP = 5


async def main() -> None:
    """Announce, retrieve for a while, rank, print; one request after the other."""
    settings = load().settings
    options = GeneratorOptions(seed=time.time_ns() % 2**32, length_median=1024, candidates=50, run="show")
    async with RelayClient(settings.kafka.bootstrap, settings=settings) as relay:
        for item in islice(Generator(options), REQUESTS):
            user = f"visitor{item.event.user_id.removeprefix('user')}"  # not one of the load's users
            event, request = replace(item.event, user_id=user), replace(item.request, user_id=user)
            await relay.announce(event)
            await asyncio.sleep(0.2)  # retrieval and pre-processing run here
            ranking = await relay.rank(request, timeout=5)
            items = np.frombuffer(request.candidates, "<u4")
            scores = ranking.scores[:, 0]
            best = np.argsort(-scores)[:TOP]
            print(
                f"{user:>12}: {len(request.prefix):4d} behaviours as prefix, outcome={ranking.outcome:6s} "
                f"{ranking.latency_ms:6.1f} ms, best of {len(items)}:",
                ", ".join(f"item {items[at]} ({scores[at]:.3f})" for at in best),
            )


if __name__ == "__main__":
    asyncio.run(main())
