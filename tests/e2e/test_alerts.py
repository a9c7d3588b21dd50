"""Prometheus's own `promtool test rules` on docker/prometheus/alerts.yml: for each rule a case that fires, and one that
does not."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml  # type: ignore[import-untyped]

from tests import needs

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "docker" / "prometheus" / "alerts.yml"
RULES: dict[str, Any] = {rule["alert"]: rule for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]}
RECORDS: dict[str, Any] = yaml.safe_load(ALERTS.read_text())["groups"][1]
RUNBOOK = (ROOT / "docs" / "how-to" / "alerts.md").read_text(encoding="utf-8")

#: An hour in steps of 15 s: nothing happens, something happens once a second, once a step, once, half way.
NEVER, PER_SECOND, PER_STEP, ONCE = "0x240", "0+15x240", "0+1x240", "0x160 1x80"

Series = dict[str, str]


class Case(NamedTuple):
    """also: of a rule `A or B`, what makes each other arm fire, and no arm but that."""

    fires: Series
    rests: Series
    also: tuple[Series, ...] = ()


def histogram(name: str, labels: str, bucket: str) -> Series:
    """An observation a second, all below this bound and above the one before."""
    bounds = ["0.01", "0.05", "0.1", "1.0", "+Inf"]
    at = bounds.index(bucket)
    return {
        f'{name}_bucket{{{labels},le="{bound}"}}': NEVER if index < at else PER_SECOND
        for index, bound in enumerate(bounds)
    }


def latency(bucket: str) -> Series:
    return histogram("relaygr_ranking_seconds", 'outcome="hbm"', bucket)


def loop(bucket: str) -> Series:
    return histogram("relaygr_loop_lag_seconds", 'instance="w"', bucket)


def calls(bucket: str) -> Series:
    return histogram("relaygr_client_rank_seconds", 'instance="w"', bucket)


def answers(ok: str, **more: str) -> Series:
    """Answers with scores by outcome `hbm`, and others by their outcome, or their status."""
    named = {'relaygr_answers_total{instance="w",status="ok",outcome="hbm"}': ok}
    for name, value in more.items():
        status, outcome = ("ok", name) if name in {"full", "truncated"} else (name, "none")
        named[f'relaygr_answers_total{{instance="w",status="{status}",outcome="{outcome}"}}'] = value
    return named


def of(name: str, value: str, more: Series | None = None, **labels: str) -> Series:
    inside = ",".join(f'{label}="{text}"' for label, text in {"instance": "w", **labels}.items())
    return {f"{name}{{{inside}}}": value, **(more or {})}


def strangers(process: str, unsigned: str, unreadable: str) -> Series:
    """Statuses that a worker, or a trigger, does not believe."""
    return of(f"relaygr_{process}statuses_unsigned_total", unsigned) | of(
        f"relaygr_{process}statuses_unreadable_total", unreadable
    )


def overloaded(within: str, device: str, refused: str = NEVER) -> Series:
    """A ranking a second with scores, so many within the SLO, so many refused; seconds of the device in two kinds."""
    return (
        answers(PER_SECOND, overloaded=refused)
        | of("relaygr_rankings_within_slo_total", within)
        | of("relaygr_device_seconds_total", device, work="ranking")
        | of("relaygr_device_seconds_total", "0+0.5x240", work="pre_infer")
    )


def budget(within: str, scenario: str = "feed") -> Series:
    """A ranking a second of a scenario's only worker, so many of them within the SLO."""
    return (
        of("relaygr_answers_total", PER_SECOND, instance=scenario, scenario=scenario, status="ok", outcome="hbm")
        | of(
            "relaygr_answers_total", PER_SECOND, instance=scenario, scenario=scenario, status="rejected", outcome="none"
        )
        | of("relaygr_rankings_within_slo_total", within, instance=scenario, scenario=scenario)
    )


#: One was late and is no more, another is late for three minutes.
OVER_OR_SHORT = budget("0x100 15+15x139", "feed") | budget("0+15x228 3420x12", "ads")
#: No process of a relay is scraped at all.
NOTHING = of("up", "1x240")
READ = of("relaygr_rankings_read_total", PER_SECOND, hops="0")
CASES = {
    "RelaygrProcessDown": Case(
        of("up", "0x240", of("relaygr_build_info", "1x100 _x140", process="worker", job="j"), job="j"),
        of("up", "1x240", of("relaygr_build_info", "1x240", process="worker", job="j"), job="j")
        | of("up", "0x240", job="another"),
    ),
    "RelaygrProcessMissing": Case(
        of("relaygr_build_info", "1x240", process="worker"),
        of("relaygr_build_info", "1x240", of("relaygr_build_info", "1x240", process="trigger"), process="worker"),
        also=(of("relaygr_build_info", "1x240", process="trigger"), NOTHING),
    ),
    "RelaygrFewerProcesses": Case(  # one of two workers has gone; the only trigger has
        of("relaygr_build_info", "1x240", process="worker")
        | of("relaygr_build_info", "1x160 _x80", instance="x", process="worker"),
        of("relaygr_build_info", "1x240", process="worker")
        | of("relaygr_build_info", "_x160 1x80", instance="x", process="worker"),
        also=(
            of("relaygr_build_info", "1x240", process="worker")
            | of("relaygr_build_info", "1x160 _x80", instance="t", process="trigger"),
        ),
    ),
    "RelaygrNotReady": Case(of("relaygr_ready", "1x220 0x20"), of("relaygr_ready", "1x235 0x5")),
    "RelaygrCallsSlow": Case(calls("0.1"), calls("0.05")),
    "RelaygrCallsFail": Case(
        of(
            "relaygr_client_rankings_total",
            PER_STEP,
            of("relaygr_client_rankings_total", PER_SECOND, outcome="hbm"),
            outcome="DeadlineExceeded",
        ),
        of(
            "relaygr_client_rankings_total",
            PER_STEP,
            of("relaygr_client_rankings_total", PER_SECOND, outcome="hbm"),
            outcome="full",
        ),
    ),
    "RelaygrGatewayUnavailable": Case(
        of("relaygr_gateway_requests_total", PER_SECOND, path="/v1/rank", status="503"),
        of("relaygr_gateway_requests_total", PER_SECOND, path="/v1/rank", status="429"),
    ),
    "RelaygrRankingSlow": Case(latency("0.1"), latency("0.05")),
    "RelaygrNoScores": Case(answers(PER_SECOND, overloaded=PER_STEP), answers(PER_SECOND, overloaded=NEVER)),
    "RelaygrTruncated": Case(answers(PER_SECOND, truncated=PER_STEP), answers(PER_SECOND, truncated="0+0.2x240")),
    "RelaygrFewPrefixHits": Case(answers(NEVER, full=PER_SECOND), answers(PER_SECOND, full=PER_STEP)),
    "RelaygrLaneUnread": Case(
        of("relaygr_lag_records", "2000x240", stage="unread"),
        of("relaygr_lag_records", "900x240", stage="unread")
        | of("relaygr_lag_records", "2000x240", stage="uncommitted")
        | of("relaygr_trigger_lag_records", "900x240", stage="unread")
        | of("relaygr_trigger_lag_records", "2000x240", stage="uncommitted"),
        also=(of("relaygr_trigger_lag_records", "2000x240", stage="unread"),),
    ),
    "RelaygrLaneCommitLag": Case(
        of("relaygr_lag_records", "0+50x240", stage="uncommitted"),
        of("relaygr_lag_records", "4900x240", stage="uncommitted")
        | of("relaygr_lag_records", "6000x240", stage="unread")
        | of("relaygr_trigger_lag_records", "4900x240", stage="uncommitted")
        | of("relaygr_trigger_lag_records", "6000x240", stage="unread"),
        also=(of("relaygr_trigger_lag_records", "0+50x240", stage="uncommitted"),),
    ),
    "RelaygrLanesWithoutOwner": Case(
        of("relaygr_trigger_decisions_total", PER_STEP, reason="no_owner"),
        of("relaygr_trigger_decisions_total", PER_STEP, reason="stale"),
    ),
    "RelaygrOverload": Case(
        overloaded(within="0+14x240", device="0+14x240"),
        overloaded(within=PER_SECOND, device="0+14x240")
        | of("relaygr_device_seconds_total", "0+6x240", instance="x", work="full")  # late, and not for want of a device
        | of("relaygr_answers_total", PER_SECOND, instance="x", status="ok", outcome="hbm")
        | of("relaygr_rankings_within_slo_total", "0+14x240", instance="x"),
        also=(overloaded(within=PER_SECOND, device="0+14x240", refused=PER_STEP),),
    ),
    "RelaygrBudgetBurnsFast": Case(budget("0+12.6x240"), OVER_OR_SHORT | budget("0+13x240", "search")),  # 16 %, 13.3 %
    "RelaygrBudgetBurns": Case(budget("0+14x240"), OVER_OR_SHORT | budget("0+14.2x240", "search")),  # 6.7 %, 5.3 %
    "RelaygrBudgetBurnsSlowly": Case(budget("0+14.8x240"), budget("0+14.9x240")),  # 1.3 %, 0.7 %
    "RelaygrHotLane": Case(
        of("relaygr_forwards_total", "0+3x240", READ, result="sent"),
        of("relaygr_forwards_total", "0+1x240", READ, result="sent"),
    ),
    "RelaygrPreInferStarved": Case(
        of(
            "relaygr_pre_infer_jobs_total",
            PER_STEP,
            of("relaygr_pre_infer_jobs_total", PER_STEP, result="finished"),
            result="late",
        ),
        of(
            "relaygr_pre_infer_jobs_total",
            PER_STEP,
            of("relaygr_pre_infer_jobs_total", PER_SECOND, result="finished"),
            result="late",
        ),
    ),
    "RelaygrPreInferWasted": Case(
        of("relaygr_pins_expired_total", PER_STEP, of("relaygr_trigger_decisions_total", "0+2x240", reason="admitted")),
        of(  # a delegate's pin ends in the same way
            "relaygr_pins_expired_total",
            PER_STEP,
            of("relaygr_trigger_decisions_total", "0+2x240", reason="admitted")
            | of("relaygr_trigger_decisions_total", PER_SECOND, reason="delegated"),
        ),
    ),
    "RelaygrAuditsStopped": Case(
        answers("0+30x240") | of("relaygr_audits_total", "7x240", verdict="agreed", storage="exact"),
        answers("0+30x240") | of("relaygr_audits_total", "7x200 8x40", verdict="agreed", storage="exact"),
    ),
    "RelaygrScoresDeviate": Case(
        of("relaygr_audits_total", ONCE, verdict="deviated", storage="exact"),
        of("relaygr_audits_total", PER_STEP, verdict="agreed", storage="exact"),
    ),
    "RelaygrDeadLetters": Case(
        of("relaygr_dead_letters_total", "0x220 1x20", reason="malformed"),
        of("relaygr_dead_letters_total", "0x20 5x220", reason="malformed")  # an old one
        | of("relaygr_dead_letters_total", "0x220 1x20", reason="crashed")  # RelaygrRankingEndsWorkers
        | of("relaygr_trigger_dead_letters_total", "0x20 5x220", reason="malformed"),
        also=(of("relaygr_trigger_dead_letters_total", "0x220 1x20", reason="malformed"),),
    ),
    "RelaygrDeadLettersStuck": Case(
        of("relaygr_dead_letters_waiting", "1x240"),
        of("relaygr_dead_letters_waiting", "0x230 1x1 0x9")
        | of("relaygr_trigger_dead_letters_waiting", "0x230 1x1 0x9"),
        also=(of("relaygr_trigger_dead_letters_waiting", "1x240"),),
    ),
    "RelaygrRankingEndsWorkers": Case(
        of("relaygr_dead_letters_total", ONCE, reason="crashed"),
        of("relaygr_dead_letters_total", ONCE, reason="invalid"),
    ),
    "RelaygrNameConflict": Case(
        of("relaygr_name_conflicts_total", "0x220 9x20"), of("relaygr_name_conflicts_total", "0x20 9x220")
    ),
    "RelaygrStrangers": Case(
        strangers("", PER_STEP, "5x240"),
        strangers("", "5x240", "5x240") | strangers("trigger_", "5x240", "5x240"),
        also=(
            strangers("", "5x240", PER_STEP),
            strangers("trigger_", PER_STEP, "5x240"),
            strangers("trigger_", "5x240", PER_STEP),
        ),
    ),
    "RelaygrDeviceStalled": Case(  # seen once before the worker ended and came back; an old one
        of("relaygr_device_stall_seconds", "0.2x232 7 _x3 0.2x10"),
        of("relaygr_device_stall_seconds", "0.2x200 7 _x3 0.2x40"),
    ),
    "RelaygrLoopSlow": Case(loop("1.0"), loop("0.05")),
    "RelaygrRepliesFail": Case(
        of("relaygr_reply_failures_total", PER_STEP), of("relaygr_reply_failures_total", "5x240")
    ),
    "RelaygrStoreErrors": Case(
        of("relaygr_history_reads_total", PER_STEP, result="mismatch"),
        of("relaygr_history_reads_total", PER_STEP, result="ok"),
    ),
    "RelaygrPartsMadeAnew": Case(
        of("relaygr_parts_made_anew_total", "0x160 0+1x80", part="a producer"),
        of("relaygr_parts_made_anew_total", ONCE, part="a producer"),
    ),
    "RelaygrSpansLost": Case(
        of("relaygr_spans_total", PER_STEP, result="dropped"), of("relaygr_spans_total", PER_SECOND, result="exported")
    ),
}


def test_every_rule_has_a_case_and_a_runbook() -> None:
    assert CASES.keys() == RULES.keys()
    assert sorted(re.findall(r"^## (Relaygr\w+)$", RUNBOOK, re.M)) == sorted(RULES)
    for rule in RULES.values():
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"]["summary"]


@pytest.mark.stack
def test_prometheus_accepts_the_rules() -> None:
    assert promtool("check", "rules", str(ALERTS)).returncode == 0


def test_every_arm_of_a_rule_has_a_case() -> None:
    few = {
        alert: f"{1 + len(case.also)} cases that fire"
        for alert, case in CASES.items()
        if len(case.also) < len(re.findall(r"\bor\b", RULES[alert]["expr"]))
    }
    assert few == {}


@pytest.mark.stack
def test_a_rule_fires_when_it_should_and_names_the_fleet_that_suffers(tmp_path: Path) -> None:
    """Each arm of it, too. Two fleets, of which one is well, are scraped by one Prometheus, and are told apart by the
    label `fleet` alone; one fleet needs no such label."""

    def tests(alert: str, case: Case) -> list[dict[str, Any]]:
        arms = (case.fires, *case.also)
        alone = [checked(alert, arm, {"{}": 1}) for arm in arms if arm in (case.fires, NOTHING)]
        beside = [
            checked(alert, of_fleet("a", arm) | of_fleet("b", case.rests), {'{fleet="a"}': 1})
            for arm in arms
            if arm != NOTHING or case.fires == NOTHING
        ]
        both = of_fleet("a", case.fires) | of_fleet("b", case.fires)
        return [*alone, *beside, checked(alert, both, {'{fleet="a"}': 1, '{fleet="b"}': 1})]

    assert_hold(tests, tmp_path)


@pytest.mark.stack
def test_of_two_scenarios_an_alert_names_the_one_that_suffers(tmp_path: Path) -> None:
    """Also by rankings of a worker that has gone since."""
    burns = [alert for alert in RULES if alert.startswith("RelaygrBudget")]
    gone = {
        name.replace('"feed"', '"gone"', 1): values.replace("x240", "x160 _x80")
        for name, values in budget(NEVER).items()
    }
    both = budget(PER_SECOND, "ads") | budget("0+13.5x240", "feed")  # 10 % are late

    def named(alert: str, series: Series, scenarios: list[str]) -> dict[str, Any]:
        test = checked(alert, series, {f'{{scenario="{name}"}}': 1 for name in scenarios})
        test["promql_expr_test"][0]["expr"] = test["promql_expr_test"][0]["expr"].replace("(fleet)", "(scenario)", 1)
        return test

    def tests(alert: str, _: Case) -> list[dict[str, Any]]:
        slowly = [named(alert, gone | budget(PER_SECOND), ["feed"])] if alert.endswith("Slowly") else []
        return [named(alert, both, [] if alert.endswith("Fast") else ["feed"]), *slowly]

    assert len(burns) == 3
    assert_hold(tests, tmp_path, burns)


def of_fleet(fleet: str, series: Series) -> Series:
    return {name.replace("{", f'{{fleet="{fleet}",', 1): values for name, values in series.items()}


def checked(alert: str, series: Series, firing: dict[str, int]) -> dict[str, Any]:
    """One test of promtool. firing: number of alerts in the end by what their label `fleet` says."""
    return {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count by (fleet) (ALERTS{{alertname="{alert}", alertstate="firing"}})',
                "eval_time": "60m",
                "exp_samples": [{"labels": labels, "value": value} for labels, value in firing.items()],
            }
        ],
    }


def assert_hold(
    tests: Callable[[str, Case], list[dict[str, Any]]], folder: Path, alerts: Collection[str] = tuple(CASES)
) -> None:
    """What promtool says of these tests of each rule, in a file of its own: the others are not evaluated there."""
    files = []
    for alert in alerts:
        case = CASES[alert]
        rules, file = folder / f"{alert}.rules.yml", folder / f"{alert}.yml"
        groups = [{"name": "one", "rules": [RULES[alert]]}]
        if "relaygr:" in RULES[alert]["expr"]:
            groups.insert(0, RECORDS)
        rules.write_text(yaml.safe_dump({"groups": groups}), encoding="utf-8")
        whole = {"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": tests(alert, case)}
        file.write_text(yaml.safe_dump(whole), encoding="utf-8")
        files.append(str(file))
    done = promtool("test", "rules", *files)
    assert done.returncode == 0, done.stdout + done.stderr


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    needs.programs("promtool")
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
