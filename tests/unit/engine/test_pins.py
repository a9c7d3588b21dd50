"""Pins against a model: released exactly once, by ranking, life window, lost lane or failed entry."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from relaygr_stream.cache.entry import Entry
from relaygr_stream.engine.commands import DELEGATED_LANE
from relaygr_stream.engine.residents import HEAD_START_STEP, PinTable
from tests.properties import examples
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
        self.pins.add(name, lane, held, self.now + life, nbytes, self.now)
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
TestPins.settings = settings(max_examples=examples(30), stateful_step_count=30, suppress_health_check=list(HealthCheck))


def test_a_request_that_pins_again_gets_its_whole_life_window() -> None:
    cache = make(9, None)
    entry = compute(cache, 1, 10)
    pins = PinTable(cache)
    pins.add("r", 0, entry, 1.0, 10, 0.0)
    pins.release("r")  # its lane went away, and came back
    pins.add("r", 0, entry, 3.0, 10, 1.0)
    pins.expire(2.0)
    assert "r" in pins
    pins.expire(3.0)
    assert "r" not in pins
    assert pins.expired == 1
    cache.close()


def usual_ms(times_ms: list[float], lane: int = 0) -> float:
    """The head start learned from rankings that came so long after their signals, one after the other."""
    cache = make(9, None)
    entry = compute(cache, 1, 10)
    pins = PinTable(cache)
    for ms in times_ms:
        pins.add("r", lane, entry, 1e9, 10, since=100.0)
        pins.ranked("r", 100.0 + ms / 1e3)
        pins.ranked("r", 100.0 + 99 * ms)  # a second ranking of the same request
        pins.release("r")
    cache.close()
    return pins.head_start_ms


@given(st.floats(1, 2000), st.floats(5, 500), st.floats(1, 10), st.integers(2, 5))
def test_the_usual_head_start_comes_to_the_median_from_anywhere(
    first: float, middle: float, factor: float, every: int
) -> None:
    """Of `every` rankings one takes the factor as long; the others are the median, and two are a tie."""
    later = [middle * factor if number % every == 0 else middle for number in range(500)]
    high = middle * factor if every == 2 else middle
    assert middle / HEAD_START_STEP**3 <= usual_ms([first, *later]) <= high * HEAD_START_STEP**3


def test_a_few_very_late_rankings_count_no_more_than_others_and_from_none_it_finds_back() -> None:
    assert usual_ms([80.0] * 50 + [1e9] * 3) <= 80.0 * HEAD_START_STEP**4
    assert usual_ms([0.0] + [80.0] * 200) >= 80.0 / HEAD_START_STEP
    assert usual_ms([80.0], DELEGATED_LANE) == 0, "behind another hop: it says nothing of own users"
