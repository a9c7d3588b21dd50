"""Traffic: rates, shares and laws are those stated, and parts add up to the whole."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise, takewhile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.errors import ConfigError
from relaygr_stream.workload.arrivals import ArrivalLog, read_arrivals
from relaygr_stream.workload.traffic import Mix, Shift, Spread, Tide, Traffic
from relaygr_stream.workload.users import EXACT_RANKS, Part, Returners, UserLaw
from relaygr_stream.workload.visits import Arrival, Pace, Visit, arrivals, visits
from tests.properties import examples
from tests.unit.workload.test_arrivals import azure, prompts

WHOLE = Part(0, 8, 8)


def some(traffic: Traffic, part: Part = WHOLE, seconds: float = 50.0, seed: int = 1) -> list[Arrival]:
    return list(takewhile(lambda one: one.at < seconds, arrivals(traffic, part, seed)))


def first(traffic: Traffic, count: int, known: int | None = None) -> list[Visit]:
    return list(islice(visits(traffic, 1, known=known), count))


@pytest.mark.parametrize("revisit", [0.0, 0.5, 0.9])
def test_rate_and_returns_are_as_stated_from_the_start(revisit: float) -> None:
    traffic = Traffic(rate=400.0, users=10**8, revisit=revisit, return_s=2.0)
    found = some(traffic)
    assert len(found) == pytest.approx(20_000, rel=0.05)
    assert len([one for one in found if one.at < 5.0]) == pytest.approx(2_000, rel=0.1)
    settled = [one for one in found if one.at > 20.0]
    assert np.mean([one.returning for one in settled]) == pytest.approx(revisit, abs=0.03)
    assert all(one.at < two.at for one, two in pairwise(found))


def test_returns_come_after_the_stated_time() -> None:
    last: dict[int, float] = {}
    gaps = []
    for one in some(Traffic(rate=400.0, users=10**8, revisit=0.5, return_s=2.0)):
        if one.user in last and one.at > 20:
            gaps.append(one.at - last[one.user])
        last[one.user] = one.at
    assert np.mean(gaps) == pytest.approx(2.0, rel=0.1)
    assert np.std(gaps) == pytest.approx(2.0, rel=0.15)  # exponential


def test_known_users_are_introduced_by_first_visits_and_return() -> None:
    found = first(Traffic(rate=10.0, users=10**8, revisit=0.9), 500, known=40)
    introduced = {one.user for one in found[:40]}
    assert len(introduced) == 40 and not any(one.returning for one in found[:40])
    later = found[40:]
    assert np.mean([one.returning for one in later]) == pytest.approx(0.9, abs=0.04)


def test_a_user_stays_on_its_lane_and_its_history_grows_until_it_is_full() -> None:
    last: dict[int, Arrival] = {}
    lives = Counter[int]()
    traffic = Traffic(rate=400.0, users=300, revisit=0.3, return_s=1.0, length=100.0, max_prefix=120)
    for one in some(traffic, seconds=10):
        before = last.get(one.user)
        lives[one.user] += not one.returning
        if before is not None:
            assert one.lane == before.lane
            assert one.returning == (one.life == before.life)
            assert one.prefix > before.prefix if one.returning else one.prefix == 100
        assert one.prefix <= 120 and one.rank_at > one.at
        last[one.user] = one
    assert len({one.lane for one in last.values()}) == 8
    assert max(lives.values()) > 1


@pytest.mark.parametrize("zipf", [0.0, 1.2])
def test_parts_have_their_own_users_and_together_the_whole_rate(zipf: float) -> None:
    traffic = Traffic(rate=400.0, users=10_000, zipf=zipf, revisit=0.5, return_s=1.0)
    parts = [some(traffic, Part(first, 2, 8), seconds=20.0, seed=first) for first in range(0, 8, 2)]
    users = [{one.user for one in part} for part in parts]
    assert not any(a & b for index, a in enumerate(users) for b in users[index + 1 :])
    assert sum(len(part) for part in parts) == pytest.approx(8_000, rel=0.05)
    assert all({one.lane for one in part} == {0, 1} for part in parts)
    sizes = [len(part) for part in parts]
    assert (max(sizes) > 1.5 * min(sizes)) == bool(zipf)  # a hot user makes a hot part


@pytest.mark.parametrize("with_users", [True, False])
@settings(max_examples=examples(20), deadline=None)
@given(rate=st.floats(0.1, 1000), seed=st.integers(0, 99))
def test_a_log_is_scaled_exactly_and_keeps_gaps_and_returns(with_users: bool, rate: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    times = np.sort(rng.integers(0, 100_000, 40)).astype(np.float64)
    log = ArrivalLog("x", times, rng.integers(0, 15, 40) if with_users else None)
    if log.users is not None:
        _, codes = np.unique(log.users, return_inverse=True)
        log = ArrivalLog("x", times, codes)
    found = list(islice(arrivals(Traffic(rate=rate, arrivals=log, return_s=1.0), Part(0, 1, 1), seed), 120))
    assert len(found) / found[-1].at == pytest.approx(rate)  # three rounds
    at = np.array([one.at for one in found])
    assert (np.diff(at) >= 0).all()
    for turn in range(3):
        own = at[40 * turn : 40 * turn + 40]
        scale = (times[-1] - times[0]) / (own[-1] - own[0])
        assert scale / rate == pytest.approx((times[-1] - times[0]) / 39)
        assert np.diff(own) * scale == pytest.approx(np.diff(times), abs=1e-6 * times[-1])
    if log.users is not None:
        for turn in range(3):
            users = [one.user for one in found[40 * turn : 40 * turn + 40]]
            assert [user - turn * log.user_count for user in users] == log.users.tolist()
            seen: set[int] = set()
            for one in found[40 * turn : 40 * turn + 40]:
                assert one.returning == (one.user in seen)
                seen.add(one.user)


@pytest.mark.parametrize("kind", ["prompts", "azure"])
def test_parts_of_a_log_together_are_the_log(tmp_path: Path, kind: str) -> None:
    if kind == "prompts":
        log = read_arrivals(prompts(tmp_path / "t.jsonl", 400))
    else:
        log = read_arrivals(
            azure(tmp_path / "a.csv", [f"2023-11-16 18:{at // 60:02}:{at % 60:02}" for at in range(400)])
        )
    traffic = Traffic(rate=100.0, arrivals=log, revisit=0.3, return_s=0.5)
    parts = [some(traffic, Part(first, 2, 8), seconds=4.0) for first in range(0, 8, 2)]
    if kind == "azure":
        assert sum(map(len, parts)) == pytest.approx(400, rel=0.15)
        return
    whole = some(traffic, seconds=4.0)
    together = sorted((one.user, one.at) for part in parts for one in part)
    alike = sorted((one.user, one.at) for one in whole)
    assert [user for user, _ in together] == [user for user, _ in alike]
    assert [at for _, at in together] == pytest.approx([at for _, at in alike])


@pytest.mark.parametrize(("revisit", "then"), [(0.9, 0.3), (0.0, 0.9), (0.5, 0.0)])
@pytest.mark.parametrize("part", [WHOLE, Part(2, 3, 8)])
def test_the_share_of_returns_shifts_at_the_stated_time(revisit: float, then: float, part: Part) -> None:
    traffic = Traffic(rate=400.0, users=10**8, revisit=revisit, return_s=1.0, shift=Shift(then, 20.0))
    found = [one for one in some(traffic, part, seconds=40.0) if one.at > 10.0]
    for share, seconds in ((revisit, (10, 20)), (then, (24, 40))):  # those who are about to return come first
        returning = [one.returning for one in found if seconds[0] < one.at < seconds[1]]
        assert np.mean(returning) == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize(("revisit", "after_s"), [(1.0, 1.0), (-0.1, 1.0), (0.5, 0.0), (0.5, float("inf"))])
def test_a_shift_out_of_range_is_refused(revisit: float, after_s: float) -> None:
    with pytest.raises(ConfigError, match="shift"):
        Shift(revisit, after_s)


def test_a_tide_swings_and_keeps_the_mean() -> None:
    found = np.array([one.at for one in some(Traffic(rate=200.0, tide=Tide(0.8, 10.0), revisit=0.0), seconds=100.0)])
    assert len(found) == pytest.approx(20_000, rel=0.04)
    high = np.mean((found % 10) < 5)
    assert high == pytest.approx(0.5 + 0.8 / np.pi, abs=0.02)


@settings(deadline=None)
@given(swing=st.floats(0.01, 1.0), period=st.floats(0.1, 1e4), rate=st.floats(0.01, 1e4), start=st.floats(0, 1e5))
def test_a_tide_brings_what_it_owes(swing: float, period: float, rate: float, start: float) -> None:
    tide = Tide(swing, period)
    pace = Pace(rate, tide, start)
    before = start
    for gap in (0.0, 0.5, 1.0, 7.0):
        at = pace.after(gap)
        assert at >= before
        assert (tide.requests(at) - tide.requests(before)) * rate == pytest.approx(gap, abs=1e-6 * rate * (1 + at))
        before = at


def test_lengths_have_the_stated_quantiles() -> None:
    lengths = [one.prefix for one in first(Traffic(rate=1.0, revisit=0.0, sigma=0.7, length=200.0), 8000)]
    assert np.quantile(lengths, [0.16, 0.5, 0.84]) == pytest.approx(200 * np.exp([-0.7, 0, 0.7]), rel=0.06)
    assert max(lengths) <= 4096


def test_a_mix_has_a_short_majority_and_long_others() -> None:
    found = first(Traffic(rate=1.0, revisit=0.0, sigma=0.3, length=1000.0, mix=Mix(0.8, 50.0)), 8000)
    assert np.mean([one.long for one in found]) == pytest.approx(0.2, abs=0.02)
    for long, median in ((True, 1000.0), (False, 50.0)):
        lengths = [one.prefix for one in found if one.long == long]
        assert np.quantile(lengths, [0.16, 0.5, 0.84]) == pytest.approx(median * np.exp([-0.3, 0, 0.3]), rel=0.06)
    kinds = {one.user: one.long for one in found}
    assert all(kinds[one.user] == one.long for one in found)


@pytest.mark.parametrize(("sigma", "mix"), [(0.0, None), (0.5, None), (0.3, Mix(0.8, 64.0))])
def test_the_means_of_lengths_are_those_drawn(sigma: float, mix: Mix | None) -> None:
    found = first(Traffic(rate=1.0, revisit=0.0, sigma=sigma, length=500.0, mix=mix, max_prefix=1500), 20_000)
    lengths = np.array([one.prefix for one in found], np.float64)
    assert Spread(sigma, mix, 1500).powers(500.0) == pytest.approx((lengths.mean(), (lengths**2).mean()), rel=0.05)


def test_the_same_seed_gives_the_same_traffic(tmp_path: Path) -> None:
    log = read_arrivals(prompts(tmp_path / "t.jsonl", 100))
    for traffic in (Traffic(rate=5.0, sigma=0.5, zipf=1.0), Traffic(rate=5.0, arrivals=log)):
        one, again, other = (list(islice(arrivals(traffic, WHOLE, seed), 300)) for seed in (1, 1, 2))
        assert one == again != other


@settings(max_examples=examples(30))
@given(size=st.integers(1, 30), share=st.floats(0.05, 0.95), seed=st.integers(0, 99))
def test_each_request_is_followed_by_at_most_one_return(size: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    returners = Returners(rng)
    will_return = Counter(range(size))
    for user in range(size):
        returners.add(user)
    for user in range(size, size + 300):
        if rng.random() < share:
            back = returners.take()
            assert will_return[back] > 0
            will_return[back] -= 1
            will_return[back] += 1  # this request may be followed by a return, too
        else:
            returners.came(user)
            will_return[user] += 1
        assert len(returners) == size


@pytest.mark.parametrize("exponent", [0.4, 1.0, 1.3])
def test_the_user_law_is_zipf_beyond_the_exact_ranks_too(exponent: float) -> None:
    users = 4 * EXACT_RANKS
    drawn = UserLaw(users, exponent).draw(np.random.default_rng(3), 400_000)
    weights = np.arange(1, users + 1, dtype=np.float64) ** -exponent
    weights /= weights.sum()
    assert drawn.min() >= 0 and drawn.max() < users
    for low, high in (
        (0, 10),
        (10, 1000),
        (1000, EXACT_RANKS),
        (EXACT_RANKS, 2 * EXACT_RANKS),
        (2 * EXACT_RANKS, users),
    ):
        expected = weights[low:high].sum()
        share = np.mean((drawn >= low) & (drawn < high))
        assert share == pytest.approx(expected, abs=5 * np.sqrt(expected / 400_000))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rate", 0.0),
        ("rate", float("nan")),
        ("users", 0),
        ("revisit", 1.0),
        ("growth", 0.5),
        ("length", 9999.0),
        ("length", 4095.0),
        ("zipf", -1),
        ("sigma", 1000.0),
    ],
)
def test_nonsense_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        Traffic(**{"rate": 1.0, "users": 10, name: value})  # type: ignore[arg-type]


def test_two_tides_are_refused() -> None:
    log = ArrivalLog("x", np.array([0.0, 1.0]), None)
    with pytest.raises(ConfigError, match="tide"):
        Traffic(rate=1.0, arrivals=log, tide=Tide(0.5, 10.0))


def test_users_are_many() -> None:
    """10⁸ users cost neither memory nor time."""
    users = {one.user for one in islice(arrivals(Traffic(rate=1.0, users=10**8, revisit=0.0), WHOLE, 1), 5000)}
    assert len(users) > 4990
