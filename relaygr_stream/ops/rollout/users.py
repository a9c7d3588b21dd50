"""Which users are worth prefill before they move: a pure record of what they were ranked with in their old group.

rankings ─► uses and newest history of each user ─► those who move next, by uses × prefill time
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from msgspec import UNSET

from relaygr_stream.wire.features import FeatureTables
from relaygr_stream.wire.messages import (
    PreInferSignal,
    RankingRequest,
    prefix_length,
    prefix_tokens,
    tenant_key,
    with_version,
)
from relaygr_stream.wire.routes import Routes, position
from relaygr_stream.wire.topic_files import lane_of

#: Memory for histories. What exceeds it is halved, the users of least worth first: 28,000 of 700 behaviours fit.
KEPT_BYTES: Final = 256 << 20
#: Python's objects around a user.
OBJECT_BYTES: Final = 1024
#: The worker on whose behalf a delegated signal says that it comes: no worker's, so no ranking is passed on for it.
ON_BEHALF: Final = "rollout"


@dataclass(slots=True, eq=False)
class User:
    """One user. lane: in the new group. at: the position by which it moves. signal: of the newest ranking,
    without times; None: sent."""

    key: str
    user_id: str
    lane: int
    at: int
    tokens: int = 0
    uses: int = 0
    nbytes: int = 0
    signal: PreInferSignal | None = None

    @property
    def worth(self) -> int:
        """As far as it is known without the workers' costs."""
        return self.uses * self.tokens


class KnownUsers:
    """Users lately ranked in the old group. lanes: of the new group."""

    def __init__(self, lanes: int, most_bytes: int = KEPT_BYTES) -> None:
        self._lanes = lanes
        self._most_bytes = most_bytes
        self._users: dict[str, User] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._users)

    @property
    def keys(self) -> list[str]:
        """Of all (messages.tenant_key)."""
        return list(self._users)

    @staticmethod
    def key_of(request: RankingRequest) -> str:
        """Of its user."""
        return tenant_key(request.tenant, request.user_id)

    def ranked(self, request: RankingRequest) -> None:
        """Count a use, and keep the newest history. Copies of a request, and those that use no prefix KV, are none."""
        if request.hops or request.mode == "full" or not prefix_length(request):
            return
        key = self.key_of(request)
        user = self._users.get(key)
        if user is None:
            lane = lane_of(request.user_id, self._lanes)
            user = self._users[key] = User(key, request.user_id, lane, position(request.user_id))
            self.nbytes += OBJECT_BYTES
        user.uses += 1
        if user.uses > 1 and user.signal is None:
            return  # sent: what came since is computed with the next visit
        columns = request.columns and FeatureTables(request.columns.schema, request.columns.user)
        user.signal = signal = PreInferSignal(
            request_id=f"{ON_BEHALF}-{secrets.token_hex(8)}",
            user_id=request.user_id,
            prefix=request.prefix,
            admitted_ms=0,
            life_ms=0.0,
            tenant=request.tenant,
            columns=columns or UNSET,
            delegate=ON_BEHALF,
            **with_version(request.history, request.prefix),
        )
        user.tokens = prefix_tokens(signal)
        before, user.nbytes = user.nbytes, request.prefix.nbytes() + (columns.nbytes() if columns else 0)
        self.nbytes += user.nbytes - before
        if self.nbytes > self._most_bytes:
            self.drop(user.key for user in sorted(self._users.values(), key=lambda user: user.worth)[: len(self) // 2])

    def sent(self, user: User) -> None:
        """A broker has its signal: its history is not needed any more."""
        if self._users.get(user.key) is not user:
            return
        self.nbytes -= user.nbytes
        user.signal, user.nbytes = None, 0

    def drop(self, keys: Iterable[str]) -> None:
        """Forget these users."""
        for key in list(keys):
            user = self._users.pop(key)
            self.nbytes -= user.nbytes + OBJECT_BYTES

    def moving(self, now: Routes, then: Routes, to: str) -> list[User]:
        """Those who are not in the group now, and will be."""
        users = self._users.values()
        return [user for user in users if then.group_at(user.at) == to != now.group_at(user.at)]

    def moved(self, now: Routes, to: str) -> None:
        """Forget those who are in the group."""
        self.drop([key for key, user in self._users.items() if now.group_at(user.at) == to])
