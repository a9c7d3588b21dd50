"""What a trigger sent to whom: the signals that the workers' statuses do not tell of yet, and where each user's prefix
KV went.

What other triggers sent since a status is unknown here.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from relaygr_stream.fleet import Books, Claim, SentSignals

#: Device time of a returning user's signal where its prefix KV are kept, as a share of that of the whole prefix: a few
#: new behaviours beside hundreds, and a fixed time. An assumption: workers state averages over all users.
NEW_SHARE: Final = 0.1
#: Users of whom it is remembered where their last signal went: about as many prefix KV as a fleet's tiers hold; 60 MB.
MOST_USERS: Final = 200_000
#: Characters of their keys together, which a sender chooses, of up to 4 bytes each: 100 a user.
MOST_CHARACTERS: Final = 100 * MOST_USERS


class KeptAt(NamedTuple):
    """Where a user's last signal went, and the prefix KV are, unless they have left that worker's tiers."""

    worker: str
    incarnation: int  # of the worker: a later one has none of it
    delegated: bool  # it was not the owner of the user's lane

    def is_at(self, worker: str, incarnation: int) -> bool:
        """Whether this worker, since this start of it, has them."""
        return (self.worker, self.incarnation) == (worker, incarnation)


class SentBooks:
    """signals: to each worker, whether or not it owns lanes of this trigger."""

    def __init__(self) -> None:
        self.signals: Final[Books[SentSignals]] = Books(SentSignals)
        self._kept: OrderedDict[str, KeptAt] = OrderedDict()  # by tenant_key: who is erased must be found
        self._characters = 0  # of its keys

    def kept(self, user: str) -> KeptAt | None:
        """Where the last signal of a user (tenant_key) went; None: that is not remembered."""
        return self._kept.get(user)

    def expected_ms(self, user: str, worker: str, incarnation: int, whole_ms: float) -> float:
        """Device time of a user's signal there, where the whole prefix takes whole_ms."""
        kept = self.kept(user)
        return NEW_SHARE * whole_ms if kept is not None and kept.is_at(worker, incarnation) else whole_ms

    def remember(self, user: str, kept: KeptAt) -> None:
        """Note where a user's signal goes."""
        self.forget(user)
        self._kept[user] = kept
        self._characters += len(user)
        while len(self._kept) > MOST_USERS or self._characters > MOST_CHARACTERS:
            self._characters -= len(self._kept.popitem(last=False)[0])

    @property
    def users(self) -> list[str]:
        """Those of whom something is remembered (tenant_key)."""
        return list(self._kept)

    def forget(self, user: str) -> None:
        """Drop what is remembered of a user (tenant_key)."""
        if self._kept.pop(user, None) is not None:
            self._characters -= len(user)


def stated_wait_ms(owner: Claim, now_s: float) -> float:
    """The owner's pre-infer queue now: the stated one less the time since, at most one status interval."""
    return max(0.0, owner.worker.pre_infer_wait_ms - owner.age_ms(now_s))
