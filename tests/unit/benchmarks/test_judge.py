"""How a bench ends: with the bounds not kept, or with why its figures are not valid, and never with a traceback."""

from __future__ import annotations

import asyncio

import pytest
from change_rollout import report as report_rollouts
from handover import Run
from handover import report as report_handover
from judge import STOPPED, judge
from lean import ARMS, RATES
from lean import report as report_lean
from relaygr_lab.rollouts import Change
from relaygr_lab.verdicts import NotValid, above_0, some

from relaygr_stream.errors import RelayError


def test_bounds_not_kept_are_named_where_they_are_judged_and_only_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CHECK", raising=False)
    judge(lambda: ["slow"])
    monkeypatch.setenv("CHECK", "1")
    judge(list)
    with pytest.raises(SystemExit) as left:
        judge(lambda: ["slow", "lost"])
    assert left.value.code == 1
    assert capsys.readouterr().out.splitlines() == ["not kept: slow", "not kept: lost"]


def test_a_part_that_is_not_valid_says_why_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHECK", "1")

    async def in_tasks() -> list[str]:
        async def fail(why: str) -> None:
            raise RelayError(why)

        async with asyncio.TaskGroup() as group:
            for why in ("a worker ended", "a worker ended", "a broker ended"):
                group.create_task(fail(why))
        return []

    def unmeasured() -> list[str]:
        return [f"{1 / above_0(0.0, 'the share of hits')}"]

    with pytest.raises(SystemExit) as left:
        judge(unmeasured, lambda: asyncio.run(in_tasks()), lambda: ["slow"])
    assert left.value.code == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("not valid: the share of hits is 0; ")
    assert second == "not valid: a worker ended; a broker ended"
    assert third == "not kept: slow"


def test_ctrl_c_ends_all_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def interrupted() -> list[str]:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as left:
        judge(lambda: asyncio.run(interrupted()), lambda: ["slow"])
    assert left.value.code == STOPPED
    assert capsys.readouterr().out.splitlines() == ["stopped"]


def test_a_defect_is_no_verdict() -> None:
    with pytest.raises(KeyError):
        judge(lambda: [dict[str, str]()["missing"]])


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_what_one_divides_by_is_above_0(value: float) -> None:
    with pytest.raises(NotValid, match="the rate is "):
        above_0(value, "the rate")
    assert above_0(0.5, "the rate") == 0.5


def test_none_of_what_is_averaged_is_not_valid() -> None:
    with pytest.raises(NotValid, match="there are no rankings"):
        some([], "rankings")
    assert some((1,), "rankings") == (1,)


def test_a_fleet_that_answers_nothing_is_not_judged() -> None:
    """Each of these ended with a traceback, or passed: no NaN is above its bound."""
    with pytest.raises(NotValid, match="returns of users"):
        report_handover({False: Run(), True: Run()})
    none = {"answered": 0.0, "lost": 9.0, "p50": 0.0, "p99": 0.0, "processes_ms": 1.0, "client_ms": 1.0}
    with pytest.raises(NotValid, match="answered at 50/s"):
        report_lean({(arm, rate): [none] for arm in ARMS for rate in RATES}, dict.fromkeys(ARMS, 0.0))
    few = Change("rollout", 0.9, 1.0, 0.0, float("nan"), float("nan"), 3, 0)
    with pytest.raises(NotValid, match="3 rankings"):
        report_rollouts([few, few, few])
