"""One owner's lanes under simulated time: real shares and parts on its side, real directory, decisions and ledgers of
several triggers on the other.

Traffic moves from lane to lane, statements come late or are lost, lanes move between triggers, triggers restart,
requests may never be ranked. A trigger that has all the lanes never sends more than fits. Several do, between two
statements, and for a while after a lane moved; then the owner's own guard refuses (engine/signals.py).
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Final

from relaygr_stream.engine.budgets import LaneShares, equal_parts
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.trigger.core import Signal as Admitted
from relaygr_stream.trigger.core import TriggerCore
from relaygr_stream.trigger.decision import Policy
from relaygr_stream.trigger.ledger import Pending
from relaygr_stream.wire.messages import LaneStatus, RequestEvent, WorkerStatus
from tests.unit.trigger.parts import behaviours, worker_status

SILENCE_S: Final = 1.0
STATUS_S: Final = 0.25
KEEP_S: Final = 60.0
LIFE_S: Final = 2.0
#: What a moved lane holds ends within a life, and is stated after that.
MOVED_S: Final = LIFE_S + SILENCE_S + STATUS_S
POLICY: Final = Policy(stale_ms=1000.0, life_ms=LIFE_S * 1e3, burst_ms=1e6, max_prefix_tokens=1000)
LONGEST: Final = 100
PREFIXES: Final = [behaviours(tokens) for tokens in range(LONGEST + 1)]


@dataclass
class Signal:
    lane: int
    nbytes: int
    pending: Pending
    trigger: Trigger
    lands_s: float


class Trigger:
    """Its own view of who owns what."""

    def __init__(self, owner: Owner) -> None:
        self.directory = OwnerDirectory(SILENCE_S * 1e3, clock=lambda: owner.now)
        self.core = TriggerCore(POLICY, self.directory, KEEP_S)
        self.inbox: deque[tuple[float, WorkerStatus]] = deque()


class Owner:
    """One run; every step asserts the bound over all lanes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 100.0
        self.whole = self.random.choice([120, 300, 1000])
        self.count = self.random.randint(2, 8)
        self.loss = self.random.choice([0.0, 0.3, 0.9])
        self.ranked = self.random.choice([0.0, 0.5, 1.0])
        self.shares = LaneShares()
        self.demand = dict.fromkeys(range(self.count), 0)
        self.logs: dict[int, list[Signal]] = {lane: [] for lane in range(self.count)}
        self.read_to = dict.fromkeys(range(self.count), 0)
        self.pins: dict[int, list[tuple[float, int]]] = {lane: [] for lane in range(self.count)}
        self.rankings: list[tuple[float, int, int]] = []
        self.sent: list[Signal] = []
        self.triggers = [Trigger(self) for _ in range(self.random.randint(1, 3))]
        self.trigger_of = {lane: self.random.choice(self.triggers) for lane in range(self.count)}
        for lane, trigger in self.trigger_of.items():
            trigger.core.take_lane(lane, 0, self.now)
        self.moves = self.random.choice([False, False, True])  # whether lanes go to other triggers
        self.moved_until = 0.0
        self.hot = 0
        self.requests = 0

    @property
    def pinned(self) -> int:
        return sum(nbytes for pins in self.pins.values() for _, nbytes in pins)

    def run_checked(self, seconds: float) -> None:
        """Let time pass; what must hold is checked at each step."""
        end, next_status = self.now + seconds, self.now
        while self.now < end:
            if self.now >= next_status:
                self.state()
                next_status = self.now + STATUS_S
            self.deliver()
            for _ in range(self.random.choice([0, 0, 1, 2, 15])):
                self.event()
            if self.random.random() < 0.02:
                self.hot = self.random.randrange(self.count)
            if self.moves and self.random.random() < 0.01:
                self.lane_moves()
            if self.moves and self.random.random() < 0.005:
                self.trigger_restarts()
            self.now += self.random.choice([0.005, 0.02, 0.05])

    def state(self) -> None:
        lanes = range(self.count)
        pinned = {lane: sum(nbytes for _, nbytes in self.pins[lane]) for lane in lanes}
        shares = self.shares.update(lanes, self.demand, STATUS_S)
        budgets = equal_parts(self.whole, lanes)
        status = worker_status(
            *(
                LaneStatus(
                    lane=lane,
                    budget_bytes=budgets[lane],
                    pinned_bytes=pinned[lane],
                    pre_infer_offset=self.read_to[lane],
                    device_ms_per_s=1e6 * shares[lane],
                )
                for lane in lanes
            ),
            bytes_per_token=1,
            alloc_bytes=1,
        )
        for trigger in self.triggers:
            if self.random.random() >= self.loss:
                trigger.inbox.append((self.now + self.random.uniform(0, STATUS_S / 4), status))

    def deliver(self) -> None:
        for trigger in self.triggers:
            while trigger.inbox and trigger.inbox[0][0] <= self.now:
                trigger.directory.take(trigger.inbox.popleft()[1])
        for signal in [signal for signal in self.sent if signal.lands_s <= self.now]:
            self.sent.remove(signal)
            log = self.logs[signal.lane]
            log.append(signal)
            signal.trigger.core.on_acknowledged(signal.lane, signal.pending, len(log) - 1, self.now)
        for lane, log in self.logs.items():
            self.pins[lane] = [pin for pin in self.pins[lane] if pin[0] > self.now]
            for signal in log[self.read_to[lane] :]:
                self.read_to[lane] += 1
                if self.pinned + signal.nbytes > self.whole:
                    assert len(self.triggers) > 1 or self.now < self.moved_until, "footprint"
                    continue
                life = self.random.uniform(0.05, 0.5) if self.random.random() < self.ranked else LIFE_S
                self.pins[lane].append((self.now + life, signal.nbytes))
        for _, lane, nbytes in [ranking for ranking in self.rankings if ranking[0] <= self.now]:
            self.demand[lane] += nbytes
        self.rankings = [ranking for ranking in self.rankings if ranking[0] > self.now]

    def event(self) -> None:
        self.requests += 1
        lane = self.hot if self.random.random() < 0.8 else self.random.randrange(self.count)
        tokens = self.random.choice([10, 30, LONGEST])
        event = RequestEvent(request_id=str(self.requests), user_id="u", prefix=PREFIXES[tokens], candidates=0)
        trigger = self.trigger_of[lane]
        effect = trigger.core.on_event(lane, event, 0.0, self.now)
        if isinstance(effect, Admitted):
            lands = self.now + self.random.uniform(0, STATUS_S / 4)
            self.sent.append(Signal(lane, tokens, effect.pending, trigger, lands))
        self.rankings.append((self.now + 0.1, lane, tokens))

    def lane_moves(self) -> None:
        """Its next trigger starts where the log ends now; what is in flight still lands."""
        lane = self.random.randrange(self.count)
        self.moved_until = self.now + MOVED_S
        self.trigger_of[lane].core.leave_lane(lane, self.now)
        self.trigger_of[lane] = self.random.choice(self.triggers)
        self.trigger_of[lane].core.take_lane(lane, self.end_of(lane), self.now)

    def trigger_restarts(self) -> None:
        old, new = self.random.choice(self.triggers), Trigger(self)
        self.moved_until = self.now + MOVED_S
        self.triggers[self.triggers.index(old)] = new
        for lane, trigger in self.trigger_of.items():
            if trigger is old:
                self.trigger_of[lane] = new
                new.core.take_lane(lane, self.end_of(lane), self.now)

    def end_of(self, lane: int) -> int:
        """Where the log ends once the former trigger's sends are through: it drains before its lanes move."""
        for signal in [signal for signal in self.sent if signal.lane == lane]:
            self.sent.remove(signal)
            self.logs[lane].append(signal)
        return len(self.logs[lane])
