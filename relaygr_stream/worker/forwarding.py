"""Forwarding: a ranking that its own worker would answer too late goes to a worker that is in time by its status.

    refused here ─► a hop left? ─► a peer in time, within its room ─► one of its lanes
                         └── no ───────────────┴── no ─► answered `overloaded`, once

Statuses come a few times a second, rankings a thousand times: what was sent to a peer meanwhile counts as waiting
there, and is worked off no faster than the spare share of the peer's device allows.

A ranking whose prefix KV another worker computed on this one's behalf (trigger/delegation.py) is passed on there in the
same way, unless they are here as well: its first hop, and no other.
"""

from __future__ import annotations

import math
import random
from typing import Final, Literal, Protocol

import msgspec

from relaygr_stream.engine import budgets
from relaygr_stream.engine.commands import RankTask
from relaygr_stream.errors import DecodeError
from relaygr_stream.fleet import TRAVEL_MS, Books, OwnerDirectory, SentRankings, better_of_two
from relaygr_stream.wire.messages import WorkerStatus
from relaygr_stream.wire.versions import NOT_DECODED

#: A request that was refused twice has met two workers without room: a third search costs more than it finds.
MOST_HOPS: Final = 2
#: A peer must be done within this share of the time left, by its own numbers, for the first hop and for the second: its
#: queue is a mean of some moments ago. Where a first worker refused it, too, only one with clearly more time is asked.
IN_TIME_SHARES: Final = (0.7, 0.5)
#: A timeout of 0 on the wire means the default.
LEAST_MS: Final = 1.0

#: Why a ranking was not forwarded: `hops` used up, `alone` (no other worker), `late` (none of them would be in time).
WhyKept = Literal["hops", "alone", "late"]
WHY: Final[dict[WhyKept, str]] = {
    "hops": "it was forwarded twice",
    "alone": "there is no other worker to ask",
    "late": "no other worker would be in time",
}


def time_left_ms(task: RankTask, now: float) -> float:
    """Milliseconds that a ranking has left when it is forwarded, which it then states as its timeout.

    The next worker counts its age from then on, so clocks need not agree, and subtracts the time of the answer's way.
    """
    times = task.times
    return max(LEAST_MS, times.timeout_ms - times.age_ms - (now - times.arrived) * 1e3)


class Homes(Protocol):
    """Knows each user's own lane; the TopicSet does."""

    def lane_of(self, user_id: str) -> int:
        """The user's lane."""


class Forwarding:
    """One worker's view of its peers. name: its own; homes: the users' own lanes; seed: of the random choices.

    now: seconds of one monotonic clock.
    """

    def __init__(
        self,
        name: str,
        peers: OwnerDirectory,
        homes: Homes,
        seed: int | None = None,
    ) -> None:
        self._name = name
        self._peers = peers
        self._homes = homes
        self._random = random.Random(seed)
        self._sent: Books[SentRankings] = Books(SentRankings)

    def elsewhere(
        self, user_id: str, prefix: int, candidates: int, hops: int, left_ms: float, now: float
    ) -> int | WhyKept:
        """A lane of a worker that will answer in time, in full, and is charged with it; or why there is none.

        prefix, candidates: their numbers; hops: how often it was forwarded up to now; left_ms: until its deadline.
        """
        if hops >= MOST_HOPS:
            return "hops"
        home = self._peers.owner(self._homes.lane_of(user_id))
        # The owner of the user's lane had the request first, or reads it there: two hops never lead back.
        been = {self._name} if home is None else {self._name, home.worker.name}
        found = self._peers.sample_workers(self._random)
        peers = [s for s in found if s.state == "serving" and s.lanes and s.name not in been]
        if not peers:
            return "alone"
        in_time: list[tuple[float, tuple[float, WorkerStatus]]] = []
        for peer in peers:
            cost_ms = peer.costs.full_ms(prefix, candidates)
            done_ms = self._done_ms(peer, cost_ms, now)
            if 0.0 <= done_ms <= IN_TIME_SHARES[hops] * left_ms and cost_ms >= 0.0:
                in_time.append((done_ms, (cost_ms, peer)))
        for _, (cost_ms, peer) in better_of_two(in_time, self._random):
            if (owned := self._peers.lanes_of(peer.name)) is not None:
                self._sent.of_worker(peer.name, now).send(cost_ms)
                return self._random.choice(owned[1])
        return "late"

    def lane_of_delegate(self, name: str, left_ms: float = math.inf) -> int | None:
        """A lane of the worker that has a ranking's prefix KV; None: it is gone, or would score it too late."""
        owned = None if name == self._name else self._peers.lanes_of(name)
        if owned is None or TRAVEL_MS + owned[0].queue_ms > IN_TIME_SHARES[0] * left_ms:
            return None
        return self._random.choice(owned[1])

    def _done_ms(self, peer: WorkerStatus, cost_ms: float, now: float) -> float:
        """Milliseconds until its answer is with the client, behind what waits there and what we sent."""
        sent = self._sent.of_worker(peer.name, now)
        sent.advance(peer, budgets.AVERAGE_S, now)
        return TRAVEL_MS + peer.queue_ms + sent.ahead_ms + cost_ms


def next_hop(value: bytes, hops: int, sent_ms: int, timeout_ms: float) -> bytes:
    """The ranking request in `value` as it travels on; fields that we do not know stay as they are.

    sent_ms, timeout_ms: rewritten, because the request's own may be missing or wrong. DecodeError where it cannot
    be written again: one that decodes may bring a field that we do not know, with a name that is not UTF-8.
    """
    try:
        fields = _fields.decode(value)
    except NOT_DECODED as error:
        raise DecodeError(
            "malformed", f"a field that this program does not know cannot be passed on: {error}"
        ) from error
    for name, new in (("hops", hops), ("sent_ms", sent_ms), ("timeout_ms", timeout_ms)):
        fields[name] = msgspec.Raw(_encoder.encode(new))
    return _encoder.encode(fields)


_fields = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.msgpack.Encoder()
