"""The plan: the smallest fleet, memory by reuse distances, and what is said of them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from relaygr_lab.simulate.memory import bytes_for, reuse_bytes
from relaygr_lab.simulate.plan import Probe, search
from relaygr_lab.simulate.run import run_group, run_scenario
from relaygr_lab.simulate.scenario import Failure
from relaygr_lab.simulate.story import Window, recovery_s

from relaygr_stream.cli.main import main
from relaygr_stream.errors import CapacityError, ConfigError
from relaygr_stream.workload.visits import Arrival
from tests.unit.simulate.scenes import COSTS, SETTINGS, scenario
from tests.unit.workload.test_arrivals import prompts


def visits(*users: int) -> list[Arrival]:
    return [Arrival(float(at), float(at), user, 0, 0, 10, False, False) for at, user in enumerate(users)]


def test_reuse_distance_is_what_was_used_since() -> None:
    assert reuse_bytes(visits(1, 2, 3, 1, 1, 2), lambda tokens: tokens).tolist() == [30, 10, 30]
    assert reuse_bytes(visits(1, 2, 3), lambda tokens: tokens).tolist() == []


def test_reuse_distance_agrees_with_an_lru_of_every_size() -> None:
    rng = np.random.default_rng(2)
    users = rng.integers(0, 12, 400).tolist()
    distances = reuse_bytes(visits(*users), lambda tokens: tokens)
    for size in range(10, 130, 10):
        cached: list[int] = []
        hits = 0
        for user in users:
            hits += user in cached
            cached = [user, *(each for each in cached if each != user)][: size // 10]
        assert hits == int((distances <= size).sum())


def test_bytes_for_a_share() -> None:
    distances = np.arange(1, 101)
    assert bytes_for(distances, 0.9) == 90
    assert bytes_for(distances, 1.0) == 100
    assert bytes_for(np.array([], np.int64), 0.9) == 0


@pytest.mark.stack
def test_the_search_brackets_the_smallest_fleet() -> None:
    scene = scenario(rate=300.0, workers=1, sample=4, seconds=3.0)
    probes: list[Probe] = []
    best = search(scene, partial(run_scenario, processes=1), probes.append)
    assert best.holds
    failed = [probe.scenario.workers for probe in probes if not probe.holds]
    held = [probe.scenario.workers for probe in probes if probe.holds]
    assert best.scenario.workers == min(held)
    assert not failed or max(failed) < best.scenario.workers <= max(failed) * 1.05 + 1


def test_a_request_that_is_too_long_by_itself_is_said_so() -> None:
    scene = scenario({"relay.slo_ms": "1"}, sample=2, seconds=0.5, warm_s=0.2, mode="full")
    with pytest.raises(CapacityError, match=r"relay\.slo_ms"):
        search(scene, partial(run_scenario, processes=1), lambda probe: None)


def test_recovered_is_three_good_seconds_in_a_row() -> None:
    late = [0, 0, 0.5, 0.5, 0, 0.2, 0, 0, 0, 0]
    seconds = [Window(float(at), 10, 1.0, share, 1.0) for at, share in enumerate(late)]
    assert recovery_s(seconds, 2.5) == pytest.approx(3.5)
    assert recovery_s(seconds[:8], 2.5) is None


def test_a_second_without_requests_does_not_put_off_the_recovery() -> None:
    empty = Window(3.0, 0, math.nan, math.nan, math.nan)
    seconds = [Window(float(at), 1, 1.0, 0.0, 1.0) for at in range(6)]
    assert recovery_s([*seconds[:3], empty, *seconds[4:]], 1.0) == 0.0
    assert recovery_s([*seconds[:3], *(replace(empty, at=float(at)) for at in range(3, 9))], 2.0) is None


@pytest.mark.parametrize(
    ("share", "workers", "sample", "dead"),
    [(0.01, 1000, 40, [0, 1]), (0.02, 1000, 40, [1]), (0.02, 1000, 100, [1, 1]), (0.02, 20, 40, [1]), (0.9, 3, 3, [2])],
)
def test_so_many_are_simulated_that_the_share_of_the_dead_is_the_one_asked_for(
    share: float, workers: int, sample: int, dead: list[int]
) -> None:
    scene = scenario(workers=workers, sample=sample, seconds=2.0, failure=Failure(share=share, at=1.0))
    assert [group.dead for group in scene.groups] == dead


def test_a_group_in_which_none_dies_runs_on() -> None:
    scene = scenario(workers=1000, sample=2, seconds=2.0, failure=Failure(share=0.01, at=1.0))
    story = run_group(scene, replace(scene.groups[0], size=2))
    assert (story.dead, story.moved_lanes, story.taken_over_s) == (0, 0, None)


FLEET = ["--workers", "100", "--rate", "2000", "--users", "1000000", "--length", "512", "--sample", "3"]
SHORT = ["--seconds", "2", "--warm-up", "1", "--return-after", "1", "--processes", "1"]


def invoke(tmp_path: Path, *extra: str) -> tuple[int, str]:
    costs = tmp_path / "costs.toml"
    costs.write_text(COSTS.as_toml())
    flags = [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    result = CliRunner().invoke(main, ["simulate", *FLEET, *SHORT, "--costs", str(costs), *flags, *extra])
    return result.exit_code, result.output


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, text = invoke(tmp_path, "--json", str(out))
    assert code == 0, text
    assert "100 workers, 800 lanes, mode relay" in text and "P99" in text
    figures = json.loads(out.read_text())
    assert figures["simulated_workers"] == 3
    assert figures["statuses"] == {"ok": figures["requests"]}


def test_a_packaged_cost_file_has_a_name(tmp_path: Path) -> None:
    code, text = invoke(tmp_path, "--costs", "npu", "--set", "worker.hbm_bytes=16GiB", "--set", "worker.dram_bytes=0")
    assert code == 0, text
    assert "assumed" in text


def test_measuring_says_so_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading torch and the model took half a minute without a word."""

    def begun(*_: object, **__: object) -> None:
        raise ConfigError("it began")

    monkeypatch.setattr("relaygr_lab.simulate.calibrate.calibrate", begun)
    code, text = invoke(tmp_path, "--costs", "calibrate")
    assert code == 1
    assert text.startswith("loading the model, then measuring it on cpu")
    assert text.endswith("error: it began\n")


@pytest.mark.stack
def test_the_command_plans(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--plan", "--json", str(out), "--fail-rack", "50%", "--at", "1", "--set", "kafka.session_timeout_ms=500"]
    code, text = invoke(tmp_path, *options)
    assert code == 0, text
    assert "When a rack fails" in text and "DRAM a worker" in text
    figures = json.loads(out.read_text())
    answer = next(line for line in text.splitlines() if not re.match(r" *[\d,]+ workers, \w+, ", line))  # a probe's
    assert re.match(rf"{figures['workers']} workers? with .* of HBM and .* of DRAM each keeps? 40 ms at P99", answer)
    assert f"Full inference takes {figures['full_workers']:,}, " in text
    assert figures["full_workers"] >= figures["workers"]
    assert "inf ms" not in text
    assert figures["workers"] >= 1 and figures["holds"]
    assert figures["failure"]["failure"]["dead"] >= 1


@pytest.mark.stack
def test_a_plan_whose_memory_does_not_keep_the_slo_says_so_and_ends_with_1(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    many = ["--rate", "225", "--users", "30000", "--revisit", "90%", "--hit-target", "5%"]
    code, text = invoke(tmp_path, "--plan", "--json", str(out), *many)
    assert code == 1, text
    assert "until the SLO held" not in text and "the SLO held at no size" in text
    assert not json.loads(out.read_text())["holds"]


def test_a_plans_tiers_hold_the_longest_request(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    few = ["--rate", "5", "--users", "200", "--revisit", "90%", "--hit-target", "5%"]
    code, text = invoke(tmp_path, "--plan", "--json", str(out), *few)
    assert code == 0, text
    planned = json.loads(out.read_text())["memory"]
    assert planned["reuse"] == planned["hbm"] / 2


@pytest.mark.parametrize("rack", [[], ["--fail-rack", "50%", "--at", "1"]])
def test_where_one_worker_will_do_the_plan_says_what_its_loss_means(tmp_path: Path, rack: list[str]) -> None:
    out = tmp_path / "out.json"
    code, text = invoke(tmp_path, "--plan", "--rate", "5", "--users", "200", "--json", str(out), *rack)
    assert code == 0, text
    assert "The fleet has one worker" in text
    figures = json.loads(out.read_text())
    assert (figures["workers"], figures["failure"]) == (1, None)


def test_a_fleet_with_more_lanes_than_topics_may_have_is_said_to_be_several(tmp_path: Path) -> None:
    code, text = invoke(tmp_path, "--workers", "3992", "--sample", "1", "--rate", "400", "--users", "1000000")
    assert code == 0, text
    assert "31,936 lanes" in text and "at most 10,000 lanes: this fleet is 4 relays" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--revisit", "many"], "not a share"),
        (["--fail-rack", "2"], "fail-rack"),
        (["--fail-rack", "2%", "--at", "99"], "at = 99"),
        (["--length", "5000"], "length"),
        (["--suffix", "5000"], "max_suffix_tokens"),
        (["--candidates", "60000"], "max_candidates"),
        (["--stage-delay", "0"], "--stage-delay 0"),
        (["--stage-sigma", "1000"], "sigma at most 10"),
        (["--sigma", "1000"], "sigma = 1000"),
        (["--plan", "--hit-target", "nan"], "'nan' is not a share"),
        (["--plan", "--hit-target", "200%"], "'200%' is not within 0…1"),
        (["--mix", "80%"], "80%:128"),
        (["--mix", "2:128"], "mix = 2:128"),
        (["--tide", "half:60"], "50%:60"),
        (["--shift", "30%"], "30%:60"),
        (["--arrivals", "none.csv"], "none.csv: no such file"),
        (["--set", "worker.hbm_bytes=1MiB"], "hbm_bytes"),
        (["--bus-p99", "0.1"], "bus latency"),
        (["--costs", "none.toml"], "none.toml"),
    ],
)
def test_bad_input_is_told_in_a_line(tmp_path: Path, options: list[str], words: str) -> None:
    code, text = invoke(tmp_path, *options)
    assert code != 0
    assert words in text and "Traceback" not in text


def test_the_command_simulates_the_arrivals_of_a_log(tmp_path: Path) -> None:
    trace, out = prompts(tmp_path / "trace.jsonl", 400), tmp_path / "out.json"
    options = ["--arrivals", str(trace), "--workers", "3", "--rate", "60", "--mix", "80%:64", "--mode", "full"]
    options += ["--json", str(out)]  # in full inference, long histories take longer
    code, text = invoke(tmp_path, *options)
    assert code == 0, text
    assert "trace.jsonl: 400 arrivals" in text and "short users" in text
    figures = json.loads(out.read_text())
    assert figures["requests"] == pytest.approx(120, abs=40)  # 2 s at 60/s
    assert figures["p99_ms_short"]["value"] < figures["p99_ms_long"]["value"]
    again = tmp_path / "again.json"
    invoke(tmp_path, *options[:-1], str(again))
    untimed = {"worker_seconds_per_cpu_second"}
    assert {k: v for k, v in json.loads(again.read_text()).items() if k not in untimed} == {
        k: v for k, v in figures.items() if k not in untimed
    }
