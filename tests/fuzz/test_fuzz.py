"""The short, seeded part of `make fuzz`, and that it can find something."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest

from relaygr_stream.settings.schema import Kafka
from tests.fuzz import run as fuzz
from tests.fuzz.checks import Finding, holds
from tests.fuzz.on_the_bus import bus, flood
from tests.fuzz.run import run
from tests.fuzz.targets import targets

SHORT = 300
with ExitStack() as _stack:
    NAMES = list(targets(_stack))


@pytest.mark.parametrize("name", NAMES)
def test_bad_input_raises_nothing_but_typed_errors(name: str) -> None:
    report = run(SHORT, seed=7, only=name)
    assert report.inputs == SHORT
    assert not report.findings, str(report)


def test_an_input_depends_on_seed_target_and_number_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a finding can be looked at again, alone."""
    seen: list[float] = []
    monkeypatch.setattr(fuzz, "targets", lambda _: {"a": lambda rng: seen.append(rng.random()), "b": lambda rng: None})
    run(4, seed=3)
    assert seen == [random.Random(f"3 a {number}").random() for number in (0, 1)]


def test_what_does_not_hold_is_found_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(rng: random.Random) -> None:
        holds(rng.random() < 2, "always")
        raise ValueError("escaped")

    def worse(rng: random.Random) -> None:
        raise Finding("absurd")

    monkeypatch.setattr(fuzz, "targets", lambda _: {"bad": bad, "worse": worse})
    report = run(10, seed=1)
    assert sum(report.findings.values()) == 10
    assert "5 × worse: absurd" in str(report)
    assert "ValueError" in str(report)


@pytest.mark.stack
async def test_bad_messages_on_the_bus_are_dead_lettered_or_answered_and_nobody_stops(embedded_settings: Kafka) -> None:
    async with bus(embedded_settings) as running:
        await flood(running, SHORT, seed=7)
    assert len(running.deserved) > SHORT // 4
    assert running.expected
