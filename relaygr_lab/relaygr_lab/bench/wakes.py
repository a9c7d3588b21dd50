"""Measures how late this machine wakes a sleeping thread, a delay of every hop of a message.

A ranking's way over the bus is a chain of threads that wake each other. On few cores, which a CPU device also uses,
each thread waits for its turn. The sum of these delays estimates a lower bound of the bus's time.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import numpy as np

from relaygr_lab.bench import sleeper
from relaygr_lab.bench.results import Spread

#: Threads that a ranking and its answer wake. There: the broker's network thread, its request handler, a network thread
#: again, the worker's event loop. Back: the worker's event loop, those three, the client's event loop.
HOPS: Final = 9
#: Number of random chains for the quantiles of their sums.
DRAWN: Final = 20_000


class Wakes:
    """A context in which a separate process sleeps and wakes; `late_ms` returns the delays."""

    def __init__(self) -> None:
        # Two hundred a second for hours: sorted, and 16 bytes each.
        self._at = array("d")
        self._late_ms = array("d")

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(Path(sleeper.__file__))),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # like the measured processes, so that it competes for a core as they do
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.kill()
        await self._process.wait()
        await self._reading

    def late_ms(self, since: float, until: float) -> list[float]:
        """The delay of each wake between these two times of time.monotonic(), in milliseconds."""
        return self._late_ms[bisect_left(self._at, since) : bisect_right(self._at, until)].tolist()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        size = sleeper.TOLD * sleeper.WAKE.size
        try:
            while True:
                for at, late in sleeper.WAKE.iter_unpack(await self._process.stdout.readexactly(size)):
                    self._at.append(at)
                    self._late_ms.append(late * 1e3)
        except asyncio.IncompleteReadError:
            return


def chain(late_ms: Sequence[float]) -> Spread:
    """Quantiles of the sum of HOPS delays, each drawn at random from `late_ms`."""
    if not late_ms:
        return Spread(None, None)
    drawn = np.random.default_rng(0).choice(np.asarray(late_ms), (DRAWN, HOPS)).sum(axis=1)
    return Spread.of(drawn.tolist())
