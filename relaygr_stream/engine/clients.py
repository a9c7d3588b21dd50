"""Per-client accounts: what each client has waiting, and how much device time it was given.

    full ─► the client with the most of what is scarce loses its latest ranking
    device free ─► clients within SLACK of the least served one, by deadline

A client is who a request says it is (RankingRequest.client_id): claimed, not proven. Under many names one client gets
many shares, so names are bounded in number, and those beyond share one account.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, Protocol

from relaygr_stream.errors import CacheCorruption

#: Clients told apart at once. The device thread looks at each that has work ready: a ranking's queueing, forecast and
#: booking take 9 µs with one client, 16 with 4, 68 with 64 and 306 with 256 of them ready at once.
MOST_CLIENTS: Final = 64
#: Deadlines decide among clients while none is ahead of the least served one by more than so many slices. Less would
#: break up batches of honest clients; more lets a client with nearer deadlines hold up another one for longer.
SLACK_SLICES: Final = 4

#: What can be scarce: places in the queue, memory, device time.
Measure = Literal["waiting", "nbytes", "ms"]


class Account:
    """One client's account. waiting, nbytes, ms: rankings without an answer, their memory, their predicted device time.

    served_ms: device time it was given, counted from no earlier than that of the clients it met when it came.
    """

    __slots__ = ("ms", "name", "nbytes", "served_ms", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.served_ms = 0.0
        self.waiting = 0
        self.nbytes = 0
        self.ms = 0.0

    def of(self, measure: Measure) -> float:
        """How much of a scarce thing this client holds."""
        return self.waiting if measure == "waiting" else self.nbytes if measure == "nbytes" else self.ms


class Booked(Protocol):
    """What an account needs of a ranking: the account, its bytes, its predicted device time."""

    account: Account
    nbytes: int
    cost_ms: float


#: The account of a task that was not booked yet.
UNBOOKED: Final = Account("")


class Clients:
    """The accounts of clients that have rankings waiting, or were served more than others lately."""

    def __init__(self, slack_ms: float = float("inf")) -> None:
        self.slack_ms = slack_ms
        self.floor_ms = 0.0  # served_ms of the least served client that had work ready, lately
        self.nbytes = 0  # of all rankings that wait
        self._accounts: dict[str, Account] = {}
        self._rest = Account("")

    def __len__(self) -> int:
        return len(self._accounts)

    def account(self, name: str) -> Account:
        """The account of this client."""
        found = self._accounts.get(name)
        if found is None:
            if len(self._accounts) >= MOST_CLIENTS:
                self._drop_settled()
            if len(self._accounts) >= MOST_CLIENTS:
                return self._rest
            found = self._accounts[name] = Account(name)
        return found

    def add(self, booked: Booked) -> None:
        """Count a ranking as waiting; its account, nbytes and cost_ms stay as they are until `remove`."""
        account = booked.account
        account.waiting += 1
        account.nbytes += booked.nbytes
        account.ms += booked.cost_ms
        self.nbytes += booked.nbytes

    def remove(self, booked: Booked) -> None:
        """Stop counting a ranking that has its answer."""
        account = booked.account
        account.waiting -= 1
        account.nbytes -= booked.nbytes
        account.ms = account.ms - booked.cost_ms if account.waiting else 0.0
        self.nbytes -= booked.nbytes

    def heavier(self, measure: Measure, booked: Booked) -> Account | None:
        """The client that holds most of it, if that is more than its own client would hold; else None."""
        most = max(self._everyone(), key=lambda account: account.of(measure))
        own = {"waiting": 1, "nbytes": booked.nbytes, "ms": booked.cost_ms}[measure]
        return most if most.of(measure) > booked.account.of(measure) + own else None

    def check(self, booked: Sequence[Booked]) -> None:
        """Raise CacheCorruption where the accounts do not add up to these rankings."""
        for account in self._everyone():
            mine = [each.nbytes for each in booked if each.account is account]
            if (account.waiting, account.nbytes) != (len(mine), sum(mine)):
                raise CacheCorruption(
                    f"client {account.name!r} is booked for {account.waiting} rankings, has {len(mine)}"
                )
        if self.nbytes != sum(each.nbytes for each in booked):
            raise CacheCorruption(f"{self.nbytes} bytes of rankings are booked, {len(booked)} wait")

    def _everyone(self) -> Iterator[Account]:
        yield self._rest
        yield from self._accounts.values()

    def _drop_settled(self) -> None:
        """Drop accounts with nothing waiting and no device time ahead of others."""
        self._accounts = {
            name: account
            for name, account in self._accounts.items()
            if account.waiting or account.served_ms > self.floor_ms
        }
