"""The ledger of read and done offsets, against a model that keeps everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from relaygr_stream.bus.lane_reader import OffsetLedger


class LedgerMachine(RuleBasedStateMachine):
    """Random reads (with gaps, with repeats) and completions (late, twice, unknown)."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = OffsetLedger(100)
        self.read_offsets: list[int] = []
        self.done_offsets: set[int] = set()

    @rule(gap=st.integers(0, 3), count=st.integers(1, 5))
    def read_on(self, gap: int, count: int) -> None:
        start = self.ledger.position + gap
        for offset in range(start, start + count):
            assert self.ledger.read(offset)
            self.read_offsets.append(offset)

    @rule(back=st.integers(1, 10))
    def read_again(self, back: int) -> None:
        assert not self.ledger.read(self.ledger.position - back)

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(95, self.ledger.position + 5))
        known = offset in self.read_offsets and offset not in self.done_offsets
        assert self.ledger.done(offset) == known
        if known:
            self.done_offsets.add(offset)

    @invariant()
    def never_passes_undone_work(self) -> None:
        undone = [offset for offset in self.read_offsets if offset not in self.done_offsets]
        assert self.ledger.undone == len(undone)
        assert self.ledger.committable <= min(undone, default=self.ledger.position)

    @invariant()
    def is_as_far_as_it_may_be(self) -> None:
        undone = [offset for offset in self.read_offsets if offset not in self.done_offsets]
        assert self.ledger.committable == min(undone, default=self.ledger.position)


TestLedger = LedgerMachine.TestCase


@given(st.permutations(range(12)))
def test_any_order_of_completion_ends_at_the_position(order: list[int]) -> None:
    ledger = OffsetLedger(0)
    for offset in range(12):
        ledger.read(offset)
    committed = 0
    for offset in order:
        ledger.done(offset)
        assert ledger.committable >= committed
        committed = ledger.committable
    assert committed == ledger.position == 12


def test_a_former_ownership_does_not_count() -> None:
    former = OffsetLedger(0)
    former.read(0)
    former.read(1)
    # The lane was lost, others committed up to 5, and it came back: offset 1 is done late.
    now = OffsetLedger(5)
    assert not now.done(1)
    assert now.committable == 5
