"""Pins against a model: released exactly once, by ranking, life window, lost lane or failed entry."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from relaygr_stream.cache.entry import Entry
from relaygr_stream.engine.signals import PinTable
from tests.unit.cache.worlds import compute, make

REQUESTS = st.integers(0, 9)


class PinMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = make(16, None)
        self.entries = [compute(self.cache, user, 64 * (1 + user % 2)) for user in range(4)]
        self.pins = PinTable(self.cache)
        self.model: dict[str, tuple[Entry, int, int, float]] = {}  # entry, lane, bytes, end
        self.now = 0.0
        self.expired = 0

    @rule(request=REQUESTS, entry=st.integers(0, 3), life=st.floats(0.1, 5), nbytes=st.integers(1, 9))
    def add(self, request: int, entry: int, life: float, nbytes: int) -> None:
        name, held = f"r{request}", self.entries[entry]
        if name in self.pins:
            return
        lane = request % 3
        self.pins.add(name, lane, held, self.now + life, nbytes)
        self.model[name] = (held, lane, nbytes, self.now + life)

    @rule(request=REQUESTS)
    def release(self, request: int) -> None:
        name = f"r{request}"
        assert self.pins.release(name) == (self.model.pop(name, None) is not None)
        assert not self.pins.release(name)

    @rule(lane=st.integers(0, 2))
    def lose(self, lane: int) -> None:
        self.pins.release_lanes([lane])
        self.model = {name: pin for name, pin in self.model.items() if pin[1] != lane}

    @rule(entry=st.integers(0, 3))
    def forsake(self, entry: int) -> None:
        self.pins.release_entry(self.entries[entry])
        self.model = {name: pin for name, pin in self.model.items() if pin[0] is not self.entries[entry]}

    @rule(seconds=st.floats(0.01, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.pins.expire(self.now)
        over = [name for name, pin in self.model.items() if pin[3] <= self.now]
        self.expired += len(over)
        for name in over:
            del self.model[name]

    @invariant()
    def agrees(self) -> None:
        assert len(self.pins) == len(self.model)
        assert all(name in self.pins for name in self.model)
        assert self.pins.expired == self.expired
        assert self.pins.next_end == min((pin[3] for pin in self.model.values()), default=None)
        for lane in range(3):
            assert self.pins.lane_bytes(lane) == sum(pin[2] for pin in self.model.values() if pin[1] == lane)
        for entry in self.entries:
            assert entry.pins == sum(pin[0] is entry for pin in self.model.values()) == self.pins.holds()[entry]
        self.cache.check_integrity()

    def teardown(self) -> None:
        self.cache.close()


TestPins = PinMachine.TestCase
TestPins.settings = settings(max_examples=30, stateful_step_count=30, suppress_health_check=list(HealthCheck))


def test_a_request_that_pins_again_gets_its_whole_life_window() -> None:
    cache = make(9, None)
    entry = compute(cache, 1, 10)
    pins = PinTable(cache)
    pins.add("r", 0, entry, 1.0, 10)
    pins.release("r")  # its lane went away, and came back
    pins.add("r", 0, entry, 3.0, 10)
    pins.expire(2.0)
    assert "r" in pins
    pins.expire(3.0)
    assert "r" not in pins
    assert pins.expired == 1
    cache.close()
