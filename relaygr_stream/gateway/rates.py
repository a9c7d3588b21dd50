"""How many requests a second a gateway takes from each tenant, and from each address without a valid token."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

#: A stranger's part of a tenant's rate: probes and scrapes need one request a second.
STRANGERS_PART: Final = 10
#: Bytes of a refused body that count as one request more: reading and decoding them takes the loop as long.
REFUSED_BYTES: Final = 1024
#: Tenants and addresses remembered; the one that asked least recently is forgotten, and starts with a full bucket.
MAX_CALLERS: Final = 4096


class Rates:
    """A token bucket for each caller: `most` requests a second, as many at once, one at least. clock: seconds."""

    def __init__(self, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._burst = max(1.0, most)
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests, and when that was

    def wait_s(self, caller: str) -> int:
        """0: the request is within the rate, and counted. Else whole seconds until the next one is."""
        left = self._now_left(caller)
        if left >= 1:
            self._set(caller, left - 1)
            return 0
        return math.ceil((1 - left) / self._most)

    def refused(self, caller: str, size: int) -> None:
        """Count the bytes of a refused body, whatever is left: the next requests wait for them."""
        self._set(caller, self._now_left(caller) - size / REFUSED_BYTES)

    def _now_left(self, caller: str) -> float:
        left, since = self._left.get(caller, (self._burst, 0.0))
        return min(self._burst, left + self._most * (self._clock() - since))

    def _set(self, caller: str, left: float) -> None:
        self._left[caller] = (left, self._clock())
        self._left.move_to_end(caller)
        if len(self._left) > MAX_CALLERS:
            self._left.popitem(last=False)
