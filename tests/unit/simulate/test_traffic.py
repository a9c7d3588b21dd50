"""Traffic: rates, shares and laws are those stated, and parts add up to the whole."""

from __future__ import annotations

from itertools import islice, pairwise, takewhile

import numpy as np
import pytest

from relaygr_stream.errors import ConfigError
from relaygr_stream.lab.simulate.traffic import EXACT_RANKS, Arrival, Part, Traffic, UserLaw, arrivals

WHOLE = Part(0, 8, 8)


def some(traffic: Traffic, part: Part = WHOLE, seconds: float = 50.0, seed: int = 1) -> list[Arrival]:
    return list(takewhile(lambda one: one.at < seconds, arrivals(traffic, part, seed)))


@pytest.mark.parametrize("revisit", [0.0, 0.5, 0.9])
def test_rate_and_returns_are_as_stated_from_the_start(revisit: float) -> None:
    traffic = Traffic(rate=400.0, users=10**8, revisit=revisit, return_s=2.0)
    found = some(traffic)
    assert len(found) == pytest.approx(20_000, rel=0.05)
    assert len([one for one in found if one.at < 5.0]) == pytest.approx(2_000, rel=0.2)
    settled = [one for one in found if one.at > 20.0]
    assert np.mean([one.returning for one in settled]) == pytest.approx(revisit, abs=0.03)
    assert all(one.at < two.at for one, two in pairwise(found))


def test_a_user_stays_on_its_lane_and_its_history_grows() -> None:
    last: dict[int, Arrival] = {}
    for one in some(
        Traffic(rate=400.0, users=300, revisit=0.3, return_s=1.0, length=100.0, max_prefix=120), seconds=10
    ):
        before = last.get(one.user)
        if before is not None:
            assert one.returning and one.lane == before.lane
            assert one.prefix > before.prefix or one.prefix == 120
        last[one.user] = one
        assert one.rank_at > one.at
    assert len({one.lane for one in last.values()}) == 8


def test_parts_have_their_own_users_and_together_the_whole_rate() -> None:
    traffic = Traffic(rate=400.0, users=10_000, revisit=0.5, return_s=1.0)
    parts = [some(traffic, Part(first, 2, 8), seconds=20.0, seed=first) for first in range(0, 8, 2)]
    users = [{one.user for one in part} for part in parts]
    assert not any(a & b for index, a in enumerate(users) for b in users[index + 1 :])
    assert sum(len(part) for part in parts) == pytest.approx(8_000, rel=0.05)
    assert all({one.lane for one in part} == {0, 1} for part in parts)


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
        ("exponent", -1),
    ],
)
def test_nonsense_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        Traffic(**{"rate": 1.0, "users": 10, name: value})  # type: ignore[arg-type]


def test_users_are_many() -> None:
    """10⁸ users cost neither memory nor time."""
    users = {one.user for one in islice(arrivals(Traffic(rate=1.0, users=10**8, revisit=0.0), WHOLE, 1), 5000)}
    assert len(users) > 4990
