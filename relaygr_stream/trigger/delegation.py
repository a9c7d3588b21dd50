"""Delegation: prefix KV that a lane's owner would have too late are computed by another worker with room and time.

    refused, or late at the owner ─► owners of some other lanes ─► in time, within their room
                                        └─ two of them at random ─► the sooner one

Room is the memory that the delegate states for others. Time is what it states to wait for, and what this trigger sent
it since. Neither counts for a user whose prefix KV the delegate has. The owner is told (signals.py) and passes the
ranking on. A miss costs one full inference, so nothing here must be exact.
"""

from __future__ import annotations

import random
from typing import Final, NamedTuple

from relaygr_stream.fleet import LOOKED_AT, TRAVEL_MS, Claim, Leaders, OwnerDirectory, better_of_two
from relaygr_stream.trigger.sent import NEW_SHARE, KeptAt, SentBooks
from relaygr_stream.wire.worker_status import prefix_bytes, usable_costs

#: Nothing is delegated for so long after a delegated signal that Kafka refused: without the grant to write `ranking`,
#: owners would compute in full what they could have pre-inferred. Where a lane's broker is away, that lane
#: alone is left out.
PAUSE_S: Final = 10.0
#: Owners are told of refusals and delegates so often (signals.py). A ranking follows its event after tens of
#: milliseconds; more frequent records would cost the trigger more.
FLUSH_S: Final = 0.02
#: An owner knows of a delegate so long after the decision: the delegated signal is acknowledged, the next flush comes,
#: and the notice travels. It infers a ranking that comes sooner in full, and what the delegate computes is for nothing.
NOTICE_MS: Final = FLUSH_S * 1e3 + TRAVEL_MS
#: An owner that is busy for no more than this share of the time computes a delegated user's prefix KV itself at the
#: next visit: the device time is there, and later rankings save the way to the delegate. Half is a choice, no optimum.
IDLE_SHARE: Final = 0.5


class Place(NamedTuple):
    """A worker that computes a prefix for another, by one of its lanes; what it takes there."""

    worker: str
    incarnation: int
    lane: int
    nbytes: int
    cost_ms: float


class Delegation:
    """Finds delegates. sent: what this trigger sent; lanes: how many there are; seed: of the random choices.

    leaders: of the partitions of `ranking`, on which signals are sent; None: each has one.
    """

    def __init__(
        self,
        owners: OwnerDirectory,
        sent: SentBooks,
        lanes: int,
        seed: int | None = None,
        leaders: Leaders | None = None,
    ) -> None:
        self._owners = owners
        self.lanes = lanes
        self.sent: Final = sent
        self._random = random.Random(seed)
        self._leaders = leaders
        self._paused_until_s: dict[int | None, float] = {}  # by lane; None: all of them

    def not_sent(self, now_s: float, lane: int | None = None) -> None:
        """A delegated signal could not be sent: find no places for PAUSE_S, or none on this lane."""
        self._paused_until_s[lane] = now_s + PAUSE_S

    def place(
        self, user: str, tokens: int, owner: Claim, within_ms: float, now_s: float, *, late: bool
    ) -> Place | None:
        """The worker that computes a user's prefix KV for the owner; None: the owner does. Changes nothing.

        user: tenant_key. late: the owner would have them behind the ranking, or refuses. within_ms: the time that
        another worker may take. Returning users go where their prefix KV are: to the owner if it has them, to the last
        delegate while the owner is busy or late. Anywhere else, all of it would be computed anew, which in overload
        makes every queue longer.
        """
        name, kept = owner.worker.name, self.sent.kept(user)
        if kept is not None and kept.is_at(name, owner.worker.incarnation):
            return None
        if kept is not None and kept.delegated and (late or owner.worker.busy_share > IDLE_SHARE):
            place = self.place_kept(kept, tokens, now_s)
            if place is not None:
                return place
        return self.find(tokens, name, within_ms, now_s) if late else None

    def find(self, tokens: int, owner: str, within_ms: float, now_s: float) -> Place | None:
        """A worker that has the prefix KV of so many tokens within this time. Changes nothing."""
        found: dict[str, tuple[float, Place]] = {}
        for lane in self._random.sample(range(self.lanes), min(LOOKED_AT, self.lanes)):
            claim = self._owners.owner(lane)
            if claim is None or claim.worker.name == owner or claim.worker.name in found:
                continue
            if not self._takes_signals(lane, now_s):
                continue
            place = Place(claim.worker.name, claim.worker.incarnation, lane, *self._takes(claim, tokens))
            ready_ms = self.ready_ms(claim, place, now_s)
            if ready_ms is not None and ready_ms <= within_ms:
                found[place.worker] = ready_ms, place
        return self.choose(list(found.values()))

    def place_kept(self, kept: KeptAt, tokens: int, now_s: float) -> Place | None:
        """The delegate that has most of the prefix KV from the user's last visit; None: it is gone.

        Whether or not it has room and time: it pins no more than it may, and the ranking finds there what is kept.
        """
        owned = self._owners.lanes_of(kept.worker)
        if owned is None or owned[0].incarnation != kept.incarnation:
            return None
        lanes = [lane for lane in owned[1] if self._takes_signals(lane, now_s)]
        claim = self._owners.owner(lane := self._random.choice(lanes)) if lanes else None
        if claim is None:  # no lane takes signals, or it fell silent since a moment ago
            return None
        nbytes, cost_ms = self._takes(claim, tokens)
        return Place(kept.worker, kept.incarnation, lane, nbytes, NEW_SHARE * cost_ms)

    def choose(self, found: list[tuple[float, Place]]) -> Place | None:
        """The place that is chosen among those in time."""
        two = better_of_two(found, self._random)
        return two[0][1] if two else None

    def _takes_signals(self, lane: int, now_s: float) -> bool:
        led = self._leaders is None or self._leaders.has_leader(lane)
        return led and all(now_s >= self._paused_until_s.get(each, now_s) for each in (None, lane))

    def _takes(self, claim: Claim, tokens: int) -> tuple[int, float]:
        """Bytes and device time of a prefix there. Nothing of it is cached: the user is another worker's."""
        return prefix_bytes(tokens, claim.worker), usable_costs(claim.worker.costs).pre_infer_ms(tokens)

    def ready_ms(self, claim: Claim, place: Place, now_s: float) -> float | None:
        """When the delegate would be done, its way included; None: it has no room."""
        ahead = self.sent.signals.of_worker(place.worker, now_s).ahead(claim, now_s)
        if ahead.delegated_bytes + place.nbytes > claim.worker.delegated_bytes:
            return None
        return TRAVEL_MS + claim.worker.queue_ms + ahead.ms + place.cost_ms
