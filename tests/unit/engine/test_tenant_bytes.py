"""The bytes that announced requests of one tenant may pin: others find their room whatever it announces."""

from __future__ import annotations

import dataclasses
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.cache.entry import Entry
from relaygr_stream.engine.commands import DELEGATED_LANE
from tests.properties import examples
from tests.unit.engine.worlds import GRANULE_BYTES, LIMITS, MAX_TOKENS, World, world

QUOTA = 3 * GRANULE_BYTES
LIMITED = dataclasses.replace(LIMITS, delegated_bytes=3 * GRANULE_BYTES, tenant_bytes={"": QUOTA})
#: A request of a tenant: its number is the request's, too. Own users, and other workers'.
SIGNALS = st.tuples(st.just("signal"), st.integers(0, 5), st.integers(1, MAX_TOKENS), st.booleans())
RANKINGS = st.tuples(st.just("rank"), st.integers(0, 5), st.integers(1, MAX_TOKENS), st.just(False))
STEPS = st.tuples(st.just("work"), st.just(0), st.integers(1, 8), st.just(False))
WAITS = st.tuples(st.just("wait"), st.just(0), st.integers(1, 20), st.just(False))


def refused(made: World) -> int:
    return made.scheduler.signals.counters.signal_over_quota


def pinned(made: World) -> Counter[str]:
    """What each tenant's requests hold, counted anew."""
    entries: dict[Entry, str] = {pin.entry: pin.charged for pin in made.scheduler.pins._pins.values()}
    found: Counter[str] = Counter()
    for entry, tenant in entries.items():
        found[tenant] += made.cache.entry_bytes(entry)
    return found


def test_a_tenant_that_ranks_nothing_leaves_the_others_their_room() -> None:
    with world(limits=LIMITED) as made:
        for user in range(10):
            made.signal(f"a{user}", user, 64, tenant="loud")
        assert refused(made) == 7
        for user in range(3):
            made.signal(f"b{user}", user, 64, tenant="quiet")
        assert refused(made) == 7
        assert made.scheduler.signals.counters.signal_over_footprint == 0
        assert pinned(made) == {"loud": QUOTA, "quiet": QUOTA}
        assert {each.result for each in made.placed if each.task.tenant == "loud"} >= {"over_quota"}
        made.settle()


def test_its_room_returns_with_its_rankings_and_with_its_life_windows() -> None:
    with world(limits=LIMITED) as made:
        for user in range(3):
            made.signal(f"r{user}", user, 64, tenant="shop", life=1.0)
        made.settle()
        made.rank("r0", 0, 64, tenant="shop")
        made.settle()
        made.signal("r3", 3, 64, tenant="shop", life=1.0)
        assert refused(made) == 0
        made.now += 2
        made.step()
        for user in range(4, 7):
            made.signal(f"r{user}", user, 64, tenant="shop")
        assert refused(made) == 0
        made.settle()


def test_what_others_delegate_counts_for_their_tenant() -> None:
    with world(limits=LIMITED) as made:
        for user in range(3):
            made.signal(f"o{user}", user, 64, tenant="shop")
        made.signal("d", 9, 64, tenant="shop", lane=DELEGATED_LANE)
        assert refused(made) == 1
        made.settle()


def test_a_short_request_for_a_long_entry_counts_what_it_keeps_there() -> None:
    with world(hbm=14, limits=LIMITED) as made:
        for user in range(2):
            made.rank(f"r{user}", user, 128, tenant="shop")
            made.settle()
            made.signal(f"s{user}", user, 1, tenant="shop")
        assert refused(made) == 1
        made.settle()


def test_requests_of_one_user_count_once() -> None:
    with world(limits=LIMITED) as made:
        for number in range(6):
            made.signal(f"r{number}", 1, MAX_TOKENS, tenant="shop")
        assert refused(made) == 0
        made.settle()


def test_without_a_quota_a_tenant_may_have_it_all() -> None:
    with world() as made:
        for user in range(6):
            made.signal(f"r{user}", user, 64, tenant="shop")
        assert len(made.scheduler.pins) == 6
        made.settle()


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.one_of(SIGNALS, RANKINGS, STEPS, WAITS)), max_size=30))
def test_no_tenant_ever_pins_more(steps: list[tuple[str, tuple[str, int, int, bool]]]) -> None:
    with world(hbm=14, limits=LIMITED) as made:
        for number, (tenant, (what, user, amount, delegated)) in enumerate(steps):
            request, before = f"{tenant}{number}", refused(made)
            if what == "signal":
                had = pinned(made)[tenant]
                lane = DELEGATED_LANE if delegated else None
                made.signal(request, user, amount, tenant=tenant, lane=lane)
                if not had:
                    assert refused(made) == before, "who has nothing pinned may pin any entry"
            elif what == "rank":
                made.rank(request, user, amount, tenant=tenant)
            elif what == "wait":
                made.now += amount / 10
                made.step()
            else:
                for _ in range(amount):
                    made.step()
            for whose, nbytes in pinned(made).items():
                counted = made.scheduler.pins.tenants.bytes_of(whose)
                assert nbytes <= counted <= QUOTA
        made.settle()
        made.now += 10
        made.step()
        assert not made.scheduler.pins.tenants._held
        assert not made.scheduler.pins.tenants._bytes
