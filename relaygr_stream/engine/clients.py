"""Who is charged: what each client has waiting, and how much device time it was given.

    full ─► the client with the most of what is scarce loses its latest ranking
    device free ─► clients within SLACK of the least served one, by deadline

Where a worker serves several scenarios, these are charged in the same way, and the clients within each: a scenario gets
its part however few its clients are. One may be ahead of another by a slice only: four are most of the tightest SLO.

A client is who a request says it is (RankingRequest.client_id): claimed, not proven. Under many names one client gets
many shares, so names are bounded in number, and those beyond share one account.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
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
    """One client's account, or one scenario's. waiting, nbytes, ms: rankings without an answer, their memory, their
    predicted device time.

    parent: the account of its scenario, or of all. line: itself and all that it is a part of; parts: without that of
    all. served_ms: device time it was given, counted from no earlier than that of the accounts it met when it came.
    floor_ms: of the least served of its parts that had work ready, lately.
    """

    __slots__ = ("floor_ms", "line", "ms", "name", "nbytes", "parent", "parts", "served_ms", "waiting")

    def __init__(self, name: str, parent: Account | None = None) -> None:
        self.name = name
        self.parent = parent
        self.line: tuple[Account, ...] = (self,) if parent is None else (self, *parent.line)
        self.parts = self.line[:-1] or self.line
        self.floor_ms = 0.0
        self.served_ms = 0.0
        self.waiting = 0
        self.nbytes = 0
        self.ms = 0.0

    def held(self, measure: Measure) -> float:
        """How much of a scarce thing this client holds."""
        return self.waiting if measure == "waiting" else self.nbytes if measure == "nbytes" else self.ms

    def serve(self, ms: float) -> None:
        """It was given so much device time."""
        for each in self.line:
            each.served_ms += ms

    def join(self) -> None:
        """It has work ready again: it cannot claim the device time that others were given meanwhile."""
        for each in self.line:
            if each.parent is not None:
                each.served_ms = max(each.served_ms, each.parent.floor_ms)

    def leads(self) -> None:
        """Nobody beside it has work ready."""
        for part, whole in pairwise(self.line):
            whole.floor_ms = max(whole.floor_ms, part.served_ms)

    def in_turn(self, parts: Sequence[Account], slack_ms: float) -> list[Account]:
        """Of these parts of it, which have work ready, those whose turn it is."""
        self.floor_ms = least = max(self.floor_ms, min([each.served_ms for each in parts]))
        return [each for each in parts if each.served_ms <= least + slack_ms]


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
        self.whole = Account("all")
        self.pre_inference = Account("pre-inference")
        self._scenarios: dict[str, Account] = {}
        self._ahead: dict[str, Account] = {}
        self._accounts: dict[tuple[str, str], Account] = {}
        self._rest: dict[str, Account] = {}  # by scenario

    def __len__(self) -> int:
        return len(self._accounts)

    def account(self, name: str, scenario: str = "") -> Account:
        """The account of this client. scenario: where the worker serves several; then all clients have one."""
        found = self._accounts.get((scenario, name))
        if found is None:
            if len(self._accounts) >= MOST_CLIENTS:
                self._drop_settled()
            parent = self._scenario(self._scenarios, scenario, self.whole) if scenario else self.whole
            if len(self._accounts) >= MOST_CLIENTS:
                return self._scenario(self._rest, scenario, parent)
            found = self._accounts[scenario, name] = Account(name, parent)
        return found

    def ahead(self, scenario: str) -> Account:
        """The account of a scenario's pre-inference, which is charged apart: it gets the time that rankings leave."""
        return self._scenario(self._ahead, scenario, self.pre_inference)

    def slack(self, account: Account) -> float:
        """How many milliseconds of the device another account beside this one may have been given more, and have its
        turn."""
        return self.slack_ms / SLACK_SLICES if self._scenarios.get(account.name) is account else self.slack_ms

    def add(self, booked: Booked) -> None:
        """Count a ranking as waiting; its account, nbytes and cost_ms stay as they are until `remove`."""
        for account in booked.account.line:
            account.waiting += 1
            account.nbytes += booked.nbytes
            account.ms += booked.cost_ms

    def remove(self, booked: Booked) -> None:
        """Stop counting a ranking that has its answer."""
        for account in booked.account.line:
            account.waiting -= 1
            account.nbytes -= booked.nbytes
            account.ms = account.ms - booked.cost_ms if account.waiting else 0.0

    def heavier(self, measure: Measure, booked: Booked) -> Account | None:
        """The client that holds most of it, if that is more than its own client would hold; else None.

        Of another scenario, where that holds most of all, and more than its own would; else of its own.
        """
        own, parent = {"waiting": 1, "nbytes": booked.nbytes, "ms": booked.cost_ms}[measure], booked.account.parent

        def most(accounts: Iterable[Account], mine: Account) -> Account | None:
            found = max(accounts, key=lambda account: account.held(measure), default=mine)
            return found if found.held(measure) > mine.held(measure) + own else None

        if parent is not None and parent is not self.whole:
            other = most(self._scenarios.values(), parent)
            if other is not None:
                return max(self._parts(other), key=lambda account: account.held(measure))
        return most(self._parts(parent), booked.account)

    def goes_first(self, account: Account) -> bool:
        """Whether its scenario, with what it has waiting, has its turn before any other that waits."""
        mine = account.parent
        if mine is None or mine is self.whole:
            return False
        least_ms = self.whole.floor_ms  # `join` comes later for a scenario whose rankings wait for copies
        others = (each for each in self._scenarios.values() if each.waiting and each is not mine)
        first_ms = min((max(least_ms, each.served_ms) for each in others), default=-math.inf)
        return max(least_ms, mine.served_ms) + mine.ms <= first_ms + self.slack(mine)

    def check(self, booked: Sequence[Booked]) -> None:
        """Raise CacheCorruption where the accounts do not add up to these rankings."""
        for account in (*self._everyone(), *self._scenarios.values()):
            mine = [each.nbytes for each in booked if account in each.account.line]
            if (account.waiting, account.nbytes) != (len(mine), sum(mine)):
                raise CacheCorruption(
                    f"client {account.name!r} is booked for {account.waiting} rankings, has {len(mine)}"
                )
        if self.whole.nbytes != sum(each.nbytes for each in booked):
            raise CacheCorruption(f"{self.whole.nbytes} bytes of rankings are booked, {len(booked)} wait")

    def _everyone(self) -> Iterator[Account]:
        yield from self._rest.values()
        yield from self._accounts.values()

    def _parts(self, parent: Account | None) -> list[Account]:
        return [account for account in self._everyone() if account.parent is parent]

    @staticmethod
    def _scenario(known: dict[str, Account], scenario: str, parent: Account) -> Account:
        if scenario not in known:
            known[scenario] = Account(scenario, parent)
        return known[scenario]

    def _drop_settled(self) -> None:
        """Drop accounts with nothing waiting and no device time ahead of others."""
        self._accounts = {
            key: account
            for key, account in self._accounts.items()
            if account.waiting or (account.parent is not None and account.served_ms > account.parent.floor_ms)
        }
