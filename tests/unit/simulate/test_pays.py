"""`relaygr simulate --pays`, headroom and the chart: with fleets that hold by arithmetic, and with the simulator."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from relaygr_lab.drawing import can_draw
from relaygr_lab.simulate.pays import answer, chart, render_pays, with_own_rate
from relaygr_lab.simulate.plan import TOLERANCE, Probe, request_ms
from relaygr_lab.simulate.planned import Planned, plan, render_plan, render_probe
from relaygr_lab.simulate.report import render
from relaygr_lab.simulate.run import run_group
from relaygr_lab.simulate.scenario import Failure, Scenario
from relaygr_lab.simulate.story import PER_REQUEST, STATUSES, Story

from relaygr_stream.telemetry.printable import render_plain
from tests.unit.simulate.scenes import scenario
from tests.unit.simulate.test_plan import invoke

RATE = 100.0


@pytest.fixture(scope="module")
def story() -> Story:
    """One of real requests, whose times the tests replace."""
    scene = scenario(workers=2, sample=2, seconds=1.0, warm_s=0.2)
    return run_group(scene, scene.groups[0])


def carried(story: Story, **rates: float) -> Callable[[Scenario], Story]:
    """Simulates fleets that carry so many requests/s a worker, by mode; beyond that no request is answered."""

    def simulate(scene: Scenario) -> Story:
        holds = scene.traffic.rate / scene.workers <= rates[scene.mode]
        ms = np.full(len(story.at), 7.0 if holds else math.inf)
        return replace(story, latency_ms=ms, status=np.full(len(ms), STATUSES.index("ok") if holds else -1, np.int8))

    return simulate


def planned(simulate: Callable[[Scenario], Story], headroom: float = 0.0) -> tuple[Planned, list[Probe]]:
    """The plan, and every fleet that was tried."""
    probes: list[Probe] = []
    return plan(scenario(rate=RATE), 0.9, simulate, probes.append, headroom=headroom, fails=False), probes


@pytest.mark.parametrize(
    ("relay", "full", "said"),
    [
        (10.0, 4.0, "It pays: 10 workers with .* instead of 25 carry 100 requests/s .*: 15 saved, 2.5 times"),
        (100.0, 40.0, "It pays: 1 worker with .* instead of 3 carry"),
        (10.0, 10.0, "It does not pay: 100 requests/s within 40 ms at P99 take 10 workers .* and 10 workers in full"),
        (4.0, 10.0, "It does not pay: .* take 25 workers .* and 10 workers in full inference"),
        (10.0, 0.0, "It pays: 10 workers .* and in full inference no fleet that was tried does"),
    ],
)
def test_whether_it_pays_is_said_first_and_in_one_table(story: Story, relay: float, full: float, said: str) -> None:
    found, probes = planned(carried(story, relay=relay, full=full))
    text = render_plain(render_pays(found), 400)
    assert text.startswith(answer(found))
    assert re.match(said, answer(found)), answer(found)
    names = ("full inference", "requests/s a worker", "P99", "HBM a worker", "DRAM a worker")
    assert all(text.count(name) >= 1 for name in names)
    for shown in (text, *map(render_probe, probes)):
        assert not re.search(r"\b(inf|nan)\b", shown), shown


def test_no_request_is_told_in_words_and_not_as_a_number_that_is_none(story: Story) -> None:
    """Nor is a second after a failure in which nobody asked."""
    lone = {name: getattr(story, name)[:1] for name in PER_REQUEST}
    late = replace(story, **{**lone, "worker": story.worker[:1], "at": np.array([1.5])})
    scene = scenario(seconds=3.0, failure=Failure(share=0.5, at=0.5))
    none = replace(story, **{name: values[:0] for name, values in lone.items()}, worker=story.worker[:0])
    for shown in (render_plain(render(scene, late), 400), render_plain(render(scene, none), 400)):
        assert not re.search(r"\b(inf|nan)\b", shown), shown
        assert "none" in shown
    assert not re.search(r"\b(inf|nan)\b", render_probe(Probe(scene, none)))


def test_headroom_plans_for_more_than_the_traffic(story: Story) -> None:
    found, _ = planned(carried(story, relay=10.0, full=4.0), headroom=0.5)
    figures = found.figures()
    assert (figures["workers"], figures["rate"]) == (20, RATE)
    assert 50 <= figures["full_workers"] <= 50 * TOLERANCE
    said = "for 100 requests/s with 50% headroom (200/s at most)"
    assert said in render_plain(render_plan(found), 400).splitlines()[0]
    assert said.removeprefix("for ") in answer(found)


def test_without_a_rate_the_devices_of_twenty_workers_are_busy() -> None:
    scene = with_own_rate(scenario(rate=1.0))
    assert scene.traffic.rate * request_ms(scene) / 1e3 == pytest.approx(20, rel=0.05)


@pytest.mark.skipif(not can_draw(), reason="matplotlib is not installed")
def test_the_chart_has_both_modes_and_leaves_out_who_never_answered(story: Story) -> None:
    _, probes = planned(carried(story, relay=10.0, full=4.0))
    drawn = chart(probes, 40.0)
    assert drawn.lstrip().startswith("<?xml") and "</svg>" in drawn
    assert all(words in drawn for words in ("full (hollow", "relay (hollow", "SLO", "workers", "P99, ms"))
    assert "nan" not in drawn.lower().replace("dominant", "")
    assert chart([one for one in probes if not one.holds], 40.0)
    searched = [one for one in probes if one.scenario.settings.worker == probes[0].scenario.settings.worker]
    assert len(searched) < len(probes)
    assert chart(searched, 40.0) == drawn, "fleets with less memory would stand above each other"


def test_the_command_says_it_with_real_fleets(tmp_path: Path) -> None:
    out, drawn = tmp_path / "out.json", tmp_path / "fleets.svg"
    few = ["--rate", "5", "--users", "200", "--json", str(out), *(["--chart", str(drawn)] if can_draw() else [])]
    code, text = invoke(tmp_path, "--pays", *few)
    assert code == 0, text
    assert "It does not pay: 5 requests/s within 40 ms at P99 take 1 worker with" in text
    assert "When a rack fails" not in text and "The fleet has one worker" not in text
    figures = json.loads(out.read_text())
    assert figures["workers"] == figures["full_workers"] == 1
    assert figures["full"]["hits"]["value"] == 0
    assert drawn.exists() == can_draw()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--plan", "--pays"], "give one"),
        (["--pays", "--mode", "full"], "leave out --mode full"),
        (["--headroom", "10%"], "--headroom are for --plan and --pays"),
        (["--chart", "a.svg"], "--chart and"),
        (["--plan", "--headroom", "100%"], "leaves nothing for the traffic"),
        (["--plan", "--headroom", "-1"], "'-1' is not within 0…1"),
    ],
)
def test_options_that_contradict_each_other_are_refused(tmp_path: Path, options: list[str], words: str) -> None:
    code, text = invoke(tmp_path, *options)
    assert code == 2, text
    assert words in text
