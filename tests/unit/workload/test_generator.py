"""The generated workload is what it says: seeded, ordered, with growing histories and the stated distributions."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.errors import ConfigError
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.messages import RankingRequest, RequestEvent
from relaygr_stream.workload import generator as generator_module
from relaygr_stream.workload.generator import Generator, GeneratorOptions
from relaygr_stream.workload.items import StageDelay, WorkItem, sample_others
from tests.properties import examples

SMALL = GeneratorOptions(users=40, items=500, length=40, max_prefix=120, candidates=20, suffix=4)


def take(count: int, options: GeneratorOptions = SMALL) -> list[WorkItem]:
    return list(islice(Generator(options), count))


def test_the_same_seed_gives_the_same_requests_and_another_seed_others() -> None:
    generator = Generator(SMALL)
    first = [(item.at, item.stage_delay, item.event, item.request, item.target) for item in islice(generator, 50)]
    again = [(item.at, item.stage_delay, item.event, item.request, item.target) for item in islice(generator, 50)]
    assert first == again
    other = take(50, GeneratorOptions(users=40, items=500, length=40, max_prefix=120, candidates=20, seed=8))
    assert first[0][3] != other[0].request


@settings(max_examples=examples(25))
@given(
    seed=st.integers(0, 1000),
    suffix=st.integers(0, 10),
    revisit=st.floats(0, 0.99),
    growth=st.floats(1, 20),
    candidates=st.integers(1, 50),
)
def test_invariants(seed: int, suffix: int, revisit: float, growth: float, candidates: int) -> None:
    options = GeneratorOptions(
        seed=seed,
        users=10,
        items=100,
        length=30,
        max_prefix=60,
        suffix=suffix,
        revisit=revisit,
        growth=growth,
        candidates=candidates,
    )
    last_at = 0.0
    last_of_user: dict[str, tuple[Behaviours, int]] = {}
    names: set[str] = set()
    for item in take(60, options):
        event, request = item.event, item.request
        decode(RequestEvent, encode(event))  # what the bus would refuse raises here
        decode(RankingRequest, encode(request))
        assert item.at >= last_at
        assert 0.02 <= item.stage_delay <= 0.32
        assert event.user_id == request.user_id
        assert event.prefix == request.prefix
        assert 1 <= len(request.prefix) <= options.max_prefix
        assert len(request.suffix) == suffix
        ids = np.frombuffer(request.candidates, np.uint32)
        history = np.concatenate([request.prefix.arrays()[0], request.suffix.arrays()[0]])
        assert item.target is not None
        assert len(ids) == len(set(ids.tolist())) == event.candidates <= candidates
        assert int(ids.max()) < options.items
        assert int(history.max()) < options.items
        assert item.popularity is not None
        assert item.popularity.shape == ids.shape
        if event.user_id in last_of_user:
            before, next_item = last_of_user[event.user_id]
            grown = np.concatenate([request.prefix.arrays()[0], request.suffix.arrays()[0]])
            assert len(request.prefix) > len(before)
            assert request.prefix.slice(0, len(before)) == before
            assert grown[len(before) + suffix] == next_item  # the true next item did come next
        last_of_user[event.user_id] = (event.prefix, int(ids[item.target]))
        last_at = item.at
        assert request.request_id not in names
        names.add(request.request_id)


def test_users_beyond_the_memory_are_forgotten_and_come_back_as_new(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {item.event.user_id for item in take(400)}
    monkeypatch.setattr(generator_module, "MEMORY_BYTES", 5_000)  # some five histories
    prefixes: dict[str, Any] = {}
    for item in take(400):
        before = prefixes.get(item.event.user_id)
        if before is not None:
            assert item.event.prefix.slice(0, len(before)) == before
        prefixes[item.event.user_id] = item.event.prefix
    assert len(prefixes) > 2 * len(kept)


def test_distributions() -> None:
    options = GeneratorOptions(users=1000, items=2000, revisit=0, length=60, sigma=0.5, rate=50, suffix=0, candidates=2)
    items = take(3000, options)
    gaps = np.diff([item.at for item in items])
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.15)  # exponential: mean = deviation
    delays = np.array([item.stage_delay for item in items])
    assert np.median(delays) == pytest.approx(0.08, rel=0.05)
    first_visits = {item.event.user_id: len(item.event.prefix) for item in reversed(items)}
    lengths = np.array(list(first_visits.values()))
    assert np.median(lengths) == pytest.approx(60, rel=0.15)
    assert np.log(lengths).std() == pytest.approx(0.5, rel=0.2)
    users = [int(item.event.user_id.removeprefix("user-").split(".")[0]) for item in items]
    expected = np.arange(1, 1001) ** -1.0
    expected /= expected.sum()
    assert users.count(0) / 3000 == pytest.approx(expected[0], rel=0.25)
    assert np.mean(np.array(users) < 10) == pytest.approx(expected[:10].sum(), rel=0.15)


def test_revisits_raise_the_share_of_recent_users() -> None:
    def share(revisit: float) -> float:
        users = [
            item.event.user_id
            for item in take(400, GeneratorOptions(users=100_000, zipf=0, items=5000, length=20, revisit=revisit))
        ]
        return float(np.mean([user in users[max(0, at - 64) : at] for at, user in enumerate(users)]))

    assert share(0.0) < 0.05
    assert share(0.5) == pytest.approx(0.5, abs=0.1)


def test_describe_states_every_parameter() -> None:
    text = Generator(GeneratorOptions(seed=11, rate=33, users=44, items=5500, length=66, growth=7)).describe()
    for part in ("seed 11", "33 requests/s", "44, Zipf", "5500, Zipf", "median 66", "Poisson(6)", "median 80 ms"):
        assert part in text


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": 0},
        {"rate": float("nan")},
        {"revisit": 1.5},
        {"growth": 0.5},
        {"items": 150},
        {"suffix": -1},
        {"users": 0},
    ],
)
def test_impossible_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GeneratorOptions(**wrong)


@given(size=st.integers(1, 200), count=st.integers(0, 60), seed=st.integers(0, 99), share=st.floats(0, 1))
def test_sample_others_is_distinct_allowed_and_complete(size: int, count: int, seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    exclude = np.flatnonzero(rng.random(size) < share)
    drawn = sample_others(rng, size, np.concatenate([exclude, exclude]), count)
    assert len(drawn) == min(count, size - len(exclude))
    assert len(set(drawn.tolist())) == len(drawn)
    assert not set(drawn.tolist()) & set(exclude.tolist())
    assert all(0 <= value < size for value in drawn.tolist())


@pytest.mark.parametrize("excluded", [10, 150])  # drawn by rejection, and from what is left
def test_sample_others_is_uniform(excluded: int) -> None:
    rng = np.random.default_rng(3)
    counts = np.zeros(200)
    for _ in range(4000):
        counts[sample_others(rng, 200, np.arange(excluded), 20)] += 1
    expected = 4000 * 20 / (200 - excluded)
    assert counts[:excluded].sum() == 0
    assert counts[excluded:] == pytest.approx(expected, rel=6 / np.sqrt(expected))


@pytest.mark.parametrize(("median", "sigma"), [(-1.0, 0.1), (float("inf"), 0.1), (80.0, float("nan")), (80.0, 1000.0)])
def test_a_stage_delay_without_sense_is_refused(median: float, sigma: float) -> None:
    with pytest.raises(ConfigError, match="stage delay = "):
        StageDelay(median, sigma)


def test_stage_delay_is_cut_off() -> None:
    rng = np.random.default_rng(0)
    wide = StageDelay(median_ms=100, sigma=5)
    drawn = [wide.draw(rng) for _ in range(200)]
    assert (min(drawn), max(drawn)) == pytest.approx((0.025, 0.4))
