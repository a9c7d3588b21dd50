"""Whether rankings are better scored together or one after the other. Knows nothing of queues or models.

A batch of n takes s0 + n·s1, a ranking alone s0 + s1. One after the other, n rankings are done after (n + 1)/2 times
that on average; together, all of them after s0 + n·s1. That is sooner if s1 < s0, whatever n is: on accelerators,
hardly on CPUs, where whoever is in a batch waits for all of it.
"""

from __future__ import annotations

from typing import Final

from relaygr_stream.worker.forecast import FORGETTING, OUTLIER, Calibration

#: s0 / (s0 + s1) from which on rankings together are done sooner on average.
PAYS: Final = 0.5
#: Two go together all the same: what that saves is how s0 is known.
TRIED: Final = 2


class Batching:
    """Learns s0 / (s0 + s1) from batches of two and more, against what rankings alone take."""

    def __init__(self) -> None:
        self._alone = Calibration()
        self._saved_ms = 0.0
        self._could_ms = 0.0  # what would have been saved if s1 were 0

    def add(self, predicted_ms: float, rankings: int, ms: float) -> None:
        """So many were scored together. predicted_ms: of each alone, added up."""
        if rankings == 1:
            self._alone.add(predicted_ms, ms)
            return
        alone_ms = predicted_ms * self._alone.factor
        self._saved_ms = FORGETTING * self._saved_ms + alone_ms - min(ms, OUTLIER * alone_ms)
        self._could_ms = FORGETTING * self._could_ms + alone_ms * (1 - 1 / rankings)

    @property
    def pays(self) -> bool:
        """Whether many together are done sooner than one after the other."""
        return self._saved_ms > PAYS * self._could_ms
