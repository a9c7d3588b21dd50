"""What the tests of `make test-long` share: how many operations, with which seed, and progress for whoever waits."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

#: Progress is printed this often.
REPORT_S = 10.0


@dataclass(frozen=True)
class LongRun:
    """`operations` in all, of which each test takes its share."""

    operations: int
    seed: int

    def random(self, what: str) -> random.Random:
        """A stream of this run's seed for one test; a string, whose hash does not depend on the process."""
        return random.Random(f"{self.seed} {what}")

    def steps(self, what: str, share: float) -> Iterator[int]:
        """0, 1, … for a test that takes this share; prints what is done, and what it took in the end."""
        total = max(1, int(share * self.operations))
        start = reported = time.monotonic()
        print(f"\n{what}: {total:,} operations, --long-seed {self.seed}", flush=True)
        for step in range(total):
            yield step
            if (now := time.monotonic()) > reported + REPORT_S:
                reported = now
                print(f"{what}: {step + 1:,} of {total:,}, {(step + 1) / (now - start):,.0f}/s", flush=True)
        taken = time.monotonic() - start
        print(f"{what}: {total:,} done in {taken:.0f} s", flush=True)
