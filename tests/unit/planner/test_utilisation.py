"""How busy a device may be, by simulation, and what share is late of one that is busier."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.ops.planner import utilisation as module
from relaygr_stream.ops.planner.utilisation import (
    ALLOWED_LATE,
    BUS_MS,
    LEAST_USE,
    MOST_USE,
    Kind,
    Work,
    late,
    utilisation,
)

#: Prefix, score, head start and SLO: of a feed and a search page on an NPU, of a GPU, of a processor.
DEVICES = [
    Kind(20.0, Work(13.4, 1.0), Work(16.5, 0.01), 150.0, 50.0),
    Kind(120.0, Work(2.4, 1.5), Work(4.7, 0.02), 150.0, 20.0),
    Kind(40.0, Work(8.0, 0.3), Work(1.0, 0.1), 150.0, 20.0),
    Kind(10.0, Work(40.0, 0.5), Work(8.0, 0.2), 150.0, 50.0),
]
FEED, SEARCH, *_ = DEVICES


@pytest.mark.parametrize("of", [DEVICES[0], *(pytest.param(each, marks=pytest.mark.stack) for each in DEVICES[1:])])
def test_the_requests_are_typical(of: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    found = utilisation(of)
    module._utilisation.cache_clear()
    monkeypatch.setattr(module, "REQUESTS", 4 * module.REQUESTS)
    assert found == pytest.approx(utilisation(of), rel=0.1)
    module._utilisation.cache_clear()


works = st.builds(Work, st.floats(0, 100), st.floats(0, 10))
kinds = st.builds(Kind, st.floats(0.1, 100), works, works, st.floats(0, 1000), st.floats(1, 1000))


@given(kinds, st.floats(1, 10))
def test_a_longer_slo_allows_no_less_use(of: Kind, longer: float) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "REQUESTS", 500)
        use, more = (module._utilisation.__wrapped__((each,)) for each in (of, of._replace(slo_ms=longer * of.slo_ms)))
    assert LEAST_USE <= use <= more <= MOST_USE


def test_of_a_short_slo_half_is_left_for_the_device() -> None:
    one = Kind(1.0, Work(0.0, 0.0), Work(1.0, 0.5), 150.0, 2 * BUS_MS)
    assert LEAST_USE < utilisation(one) < utilisation(one._replace(slo_ms=4 * BUS_MS))


def test_what_is_within_a_step_is_simulated_once() -> None:
    one = Kind(7.0, Work(10.0, 0.5), Work(5.0, 0.0), 150.0, 50.0)
    use = utilisation(one)
    before = module._utilisation.cache_info()
    assert utilisation(Kind(8.0, Work(10.001, 0.501), Work(5.001, 0.0005), 150.0, 50.0)) == use
    assert module._utilisation.cache_info().hits == before.hits + 1


def test_it_is_a_function() -> None:
    found, share = utilisation(FEED), late(FEED, SEARCH, use=0.7)
    module._utilisation.cache_clear()
    module._late.cache_clear()
    assert (found, share) == (utilisation(FEED), late(FEED, SEARCH, use=0.7))


# ---- several kinds ----


def test_of_two_kinds_that_are_alike_a_device_does_what_it_does_of_one() -> None:
    assert utilisation(FEED, FEED) == pytest.approx(utilisation(FEED), rel=0.15)
    assert sum(late(FEED, FEED, use=0.8)) / 2 == pytest.approx(late(FEED, use=0.8)[0], abs=0.02)


def test_a_kind_beside_longer_rankings_is_late_where_it_would_not_be_alone() -> None:
    """Of the searches some meet a ranking of the feed, of 16 ms: they cannot wait for it."""
    (alone,), (_, beside) = late(SEARCH, use=0.4), late(FEED, SEARCH, use=0.4)
    assert alone < ALLOWED_LATE < 0.03 < beside
    assert utilisation(FEED, SEARCH) < min(utilisation(FEED), utilisation(SEARCH))
    short = FEED._replace(score=Work(2.0, 0.01))
    assert utilisation(short, SEARCH) > 2 * utilisation(FEED, SEARCH)


@given(st.lists(kinds, min_size=1, max_size=3), st.floats(0.05, 5.0))
def test_whatever_the_kinds_there_is_a_share_of_each(of: list[Kind], use: float) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "FEWER", 500)
        shares = module._late.__wrapped__(tuple(of), use)
    assert len(shares) == len(of)
    assert all(0 <= each <= 1 for each in shares)
