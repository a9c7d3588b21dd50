"""Where our answers are to come to: of two partitions of `scores`, another when nothing comes by the present one.

A partition with one copy is served by one broker, and with it every answer of a client would stay away. Knows nothing
of what is answered.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

#: Requests are out and nothing has come by the present partition for this long: the next ones name the other. Several
#: times what an answer takes, and half of client.silence_ms: where the workers are the cause, changing costs nothing.
UNHEARD_S: Final = 0.5


class ReplyRoute:
    """partitions: the present one first, then perhaps another."""

    def __init__(self, partitions: Sequence[int], clock: Callable[[], float] = time.monotonic) -> None:
        self.partitions: Final = tuple(partitions)
        self._clock = clock
        self._present, self._other = partitions[0], partitions[-1]
        self._since: dict[int, float] = {}  # partition → the oldest request since something came by it

    def choose(self) -> int:
        """For a new request."""
        if self._waiting_s(self._present) > UNHEARD_S:
            self._present, self._other = self._other, self._present
            self._since.pop(self._present, None)
        return self._name(self._present)

    def choose_again(self) -> int:
        """For a copy of a request that has got no answer: the one by which something came later, or is due for less
        long."""
        return self._name(min(self._other, self._present, key=self._waiting_s))

    def heard(self, partition: int) -> None:
        """A record came by it."""
        self._since.pop(partition, None)

    def _name(self, partition: int) -> int:
        self._since.setdefault(partition, self._clock())
        return partition

    def _waiting_s(self, partition: int) -> float:
        return self._clock() - self._since.get(partition, math.inf)


def reply_partitions(leaders: Mapping[int, int], chosen: int | None) -> list[int]:
    """The chosen partition, or any that has a leader, and one that another broker leads, if there is one.

    leaders: partition → broker; -1: nobody.
    """
    led = [partition for partition, broker in leaders.items() if broker >= 0] or list(leaders)
    first = random.choice(led) if chosen is None else chosen
    apart = [partition for partition in led if leaders[partition] != leaders[first]]
    return [first, random.choice(apart)] if apart else [first]
