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
#: What is known against the partition that is not the present one is forgotten so long after it was last named: its
#: broker may be back. Until then a slow answer by the present one is no reason to try what was silent for longer.
FORGOTTEN_S: Final = 2.0


class ReplyRoute:
    """partitions: the present one first, then perhaps another."""

    def __init__(self, partitions: Sequence[int], clock: Callable[[], float] = time.monotonic) -> None:
        self.partitions: Final = tuple(partitions)
        self._clock = clock
        self._present, self._other = partitions[0], partitions[-1]
        self._since: dict[int, float] = {}  # partition → the oldest request since something came by it
        self._named: dict[int, float] = {}  # partition → the latest request

    def choose(self) -> int:
        """For a new request."""
        self._forget()
        silent_s = self._waiting_s(self._present)
        if silent_s > UNHEARD_S and self._waiting_s(self._other) < silent_s:
            self._present, self._other = self._other, self._present
        return self._name(self._present)

    def choose_again(self) -> int:
        """For a copy of a request that has got no answer: the one by which something came later, or is due for less
        long."""
        self._forget()
        return self._name(min(self._present, self._other, key=self._waiting_s))

    def heard(self, partition: int) -> None:
        """A record came by it."""
        self._since.pop(partition, None)

    def _forget(self) -> None:
        if self._clock() - self._named.get(self._other, math.inf) > FORGOTTEN_S:
            self._since.pop(self._other, None)

    def _name(self, partition: int) -> int:
        self._named[partition] = now = self._clock()
        self._since.setdefault(partition, now)
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
