"""How many requests a second a gateway takes from each tenant, and from each address without a valid token."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

#: A stranger's part of a tenant's rate: probes and scrapes need one request a second.
STRANGERS_PART: Final = 10
#: Bytes of a refused body that count as one request more: reading and decoding them takes the loop as long.
REFUSED_BYTES: Final = 1024
#: Tenants and addresses remembered; the one that asked least recently is forgotten, and starts with a full bucket.
MAX_CALLERS: Final = 4096


class Rates:
    """A token bucket for each caller: so many requests a second, as many at once, one at least.

    most: of a caller that is not in `own`. now_s: seconds of one monotonic clock.
    """

    def __init__(self, most: float, own: Mapping[str, float] | None = None) -> None:
        self._most = most
        self._own = own or {}
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests, and when that was

    def most(self, caller: str) -> float:
        """Requests a second of this caller."""
        return self._own.get(caller, self._most)

    def wait_s(self, caller: str, now_s: float) -> int:
        """0: the request is within the rate, and counted. Else whole seconds until the next one is."""
        left = self._now_left(caller, now_s)
        if left >= 1:
            self._set(caller, left - 1, now_s)
            return 0
        return math.ceil((1 - left) / self.most(caller))

    def refused(self, caller: str, size: int, now_s: float) -> None:
        """Count the bytes of a refused body, whatever is left: the next requests wait for them."""
        self._set(caller, self._now_left(caller, now_s) - size / REFUSED_BYTES, now_s)

    def _now_left(self, caller: str, now_s: float) -> float:
        most = self.most(caller)
        burst = max(1.0, most)
        left, since = self._left.get(caller, (burst, 0.0))
        return min(burst, left + most * (now_s - since))

    def _set(self, caller: str, left: float, now_s: float) -> None:
        self._left[caller] = (left, now_s)
        self._left.move_to_end(caller)
        if len(self._left) > MAX_CALLERS:
            self._left.popitem(last=False)
