"""What the supervisor does with a process that says it is not well. Its health is scripted, its end is a future."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path

import pytest

from relaygr_stream.ops import supervisor as service
from relaygr_stream.ops.children import Probed
from relaygr_stream.ops.supervisor import PROBES_UNTIL_HUNG, Health, Supervised, Supervisor
from tests.waiting import WITHIN_S, until

READY, STUCK = Health(None, None), Health("stuck", "stuck")
ENDING = Health("stopping", "does not end", ending=True)


class Scripted(Supervised):
    """Says what the script says, its last word for ever; a kill ends it."""

    def __init__(self, script: list[Health]) -> None:
        super().__init__("scripted", (), Path())
        self.script = script
        self.asked = 0
        self.starts = 0
        self.no_memory = 0  # starts that fail
        self.stopped = False
        self.ends_well = True
        self.killed: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        self.starts += 1
        if self.starts <= self.no_memory:
            raise BlockingIOError("no process left")
        self.killed = asyncio.get_running_loop().create_future()

    async def ended(self) -> int:
        return await asyncio.shield(self.killed)

    async def health(self) -> Health:
        self.asked += 1
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def kill(self) -> None:
        if not self.killed.done():
            self.killed.set_result(-9)

    async def stop(self, within_s: float) -> bool:
        self.stopped = True
        self.kill()
        return self.ends_well


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "PROBE_S", 0.0)


async def test_some_failed_probes_are_no_hang_and_enough_in_a_row_are() -> None:
    almost = [STUCK] * (PROBES_UNTIL_HUNG - 1)
    child = Scripted([*almost, READY, *almost, READY, *almost, STUCK, READY])
    states: list[str] = []
    stop = asyncio.Event()
    running = asyncio.create_task(Supervisor([child], 1.0, lambda process: states.append(process.state)).run(stop))
    await until(lambda: child.starts == 2 and states[-1] == "ready", "started again")
    assert [state for state in states if "hangs" in state] == ["hangs (stuck), is killed"]
    assert any("ended with signal 9, starts again" in state for state in states)
    stop.set()
    assert await running


async def test_a_process_that_ends_by_itself_has_its_time_to_end() -> None:
    """A worker that an operator stopped was killed as hanging: its telemetry ends before its clients."""
    child, stop = Scripted([READY, ENDING]), asyncio.Event()
    states: list[str] = []
    running = asyncio.create_task(Supervisor([child], 4.0, lambda process: states.append(process.state)).run(stop))
    await until(lambda: child.starts == 2, "killed and started again")
    assert child.asked > PROBES_UNTIL_HUNG + 4 * service.PROBES_PER_S
    assert states[:3] == ["starting", "ready", "stopping"]
    assert "hangs (does not end), is killed" in states
    stop.set()
    await running


async def test_a_long_start_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = Health("loading the model", None)
    child, stop, seconds = Scripted([loading] * 6 + [READY, loading, READY]), asyncio.Event(), count(4.0, 8.0)
    monkeypatch.setattr(Scripted, "ran_s", property(lambda _: next(seconds)))
    states: list[str] = []
    running = asyncio.create_task(Supervisor([child], 1.0, lambda process: states.append(process.state)).run(stop))
    await until(lambda: states[-2:] == ["loading the model", "ready"], "ready for the second time")
    slow = ["loading the model, for 10 s", "loading the model, for 20 s", "loading the model, for 40 s"]
    assert states == ["starting", "loading the model", *slow, "ready", "loading the model", "ready"]
    stop.set()
    await running


async def test_what_is_stopped_is_not_asked_any_more() -> None:
    child, stop = Scripted([READY]), asyncio.Event()
    running = asyncio.create_task(Supervisor([child], 1.0, lambda process: None).run(stop))
    await until(lambda: child.asked > 0, "asked")
    stop.set()
    await running
    asked = child.asked
    for _ in range(5):
        await asyncio.sleep(0)
    assert child.asked == asked


async def test_a_defect_in_watching_one_process_stops_all_and_is_told() -> None:
    """Else that process would hang unnoticed from then on."""

    def defect(process: Supervised) -> None:
        if process.state == "ready":
            raise RuntimeError("a defect")

    children = [Scripted([STUCK]), Scripted([READY])]
    with pytest.raises(RuntimeError, match="a defect"):
        await asyncio.wait_for(Supervisor(children, 1.0, defect).run(asyncio.Event()), WITHIN_S)
    assert all(child.killed.done() for child in children)


async def test_states_that_cannot_be_printed_stop_nothing() -> None:
    """The reader of a pipe has gone, or a log's disk is full."""

    def broken(process: Supervised) -> None:
        raise BrokenPipeError("nobody reads this")

    children, stop = [Scripted([READY]), Scripted([READY])], asyncio.Event()
    running = asyncio.create_task(Supervisor(children, 1.0, broken).run(stop))
    await until(lambda: all(child.asked > 1 for child in children), "both run on")
    stop.set()
    assert await running
    assert all(child.stopped for child in children)


async def test_all_are_stopped_even_where_every_state_is_a_defect() -> None:
    def defect(process: Supervised) -> None:
        raise RuntimeError("a defect")

    children = [Scripted([READY]), Scripted([READY])]
    with pytest.raises(RuntimeError, match="a defect"):
        await asyncio.wait_for(Supervisor(children, 1.0, defect).run(asyncio.Event()), WITHIN_S)
    assert all(child.stopped for child in children)


async def test_a_start_that_the_system_refuses_is_tried_again_and_costs_no_other_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "MAX_PAUSE_S", 0.0)
    child, other, stop = Scripted([READY]), Scripted([READY]), asyncio.Event()
    child.no_memory = 1
    states: list[str] = []
    running = asyncio.create_task(
        Supervisor([child, other], 1.0, lambda process: states.append(process.state)).run(stop)
    )
    await until(lambda: child.starts == 2 and child.asked > 0, "started at the second try")
    assert any("cannot be started (no process left)" in state for state in states)
    assert (other.starts, other.stopped) == (1, False)
    stop.set()
    assert await running


async def test_a_process_that_had_to_be_killed_did_not_end_in_order() -> None:
    child, other, stop = Scripted([READY]), Scripted([READY]), asyncio.Event()
    other.ends_well = False
    running = asyncio.create_task(Supervisor([child, other], 1.0, lambda process: None).run(stop))
    await until(lambda: other.asked > 0, "both run")
    stop.set()
    assert not await running


@pytest.mark.parametrize(
    ("body", "state"),
    [
        ('{"status": "ok", "scenario": "search"}', "ready, serves search"),
        ('{"status": "ok"}', "ready"),
        ("OK", "ready"),
        ("[]", "ready"),
    ],
)
async def test_the_state_of_a_ready_child_has_the_scenario_that_it_serves_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, state: str
) -> None:
    monkeypatch.setattr(service, "probe", lambda port, path, host: Probed(200, body))
    child = Supervised("child", ("--help",), tmp_path)
    (tmp_path / "child.port").write_text("4711")
    assert (await child.health()).state == state


async def test_a_child_is_probed_after_its_port_file_was_cleaned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cleans /tmp removes old files: each child was killed for having no port, and never came back."""
    monkeypatch.setattr(service, "START_S", 0.0)
    monkeypatch.setattr(service, "probe", lambda port, path, host: Probed(200 if port == 4711 else 0, ""))
    folder = tmp_path / "ports"
    child = Supervised("child", ("--help",), folder)
    await child.start()
    await child.ended()
    (folder / "child.port").write_text("4711")
    assert await child.health() == READY
    (folder / "child.port").unlink()
    folder.rmdir()
    assert await child.health() == READY
    await child.start()
    assert (await child.health()).not_ready == "starting", "its new port is not known yet"
    await child.ended()
    assert await child.stop(1.0)


class Ordered(Scripted):
    """Notes when it is asked to stop, and when it has; ends only when so many were asked as `together` says."""

    def __init__(self, order: list[str], together: asyncio.Barrier) -> None:
        super().__init__([READY])
        self.order = order
        self.together = together

    async def stop(self, within_s: float) -> bool:
        self.order.append("stops")
        async with asyncio.timeout(WITHIN_S):
            await self.together.wait()
        self.order.append("ended")
        return await super().stop(within_s)


@pytest.mark.parametrize("first", [0, 1])
async def test_the_first_end_before_the_others_are_stopped_and_without_them_all_stop_together(first: int) -> None:
    """Without a trigger the first worker once stopped alone: its lanes went to workers that stopped right after."""
    order: list[str] = []
    alone, together = asyncio.Barrier(1), asyncio.Barrier(3 - first)
    children, stop = [Ordered(order, alone if number < first else together) for number in range(3)], asyncio.Event()
    running = asyncio.create_task(Supervisor(children, 1.0, lambda process: None, first=children[:first]).run(stop))
    await until(lambda: all(child.asked for child in children), "all run")
    stop.set()
    assert await running
    assert order == ["stops", "ended"] * first + ["stops"] * (3 - first) + ["ended"] * (3 - first)


class Rolled(Scripted):
    """Starts again when it is rolled. ends: its starts that end at once, by number from 1, with that exit code."""

    def __init__(self, name: str, ends: dict[int, int] | None = None) -> None:
        super().__init__([READY])
        self.name = name
        self.ends = ends or {}

    @property
    def pid(self) -> int:
        return 0 if self.killed.done() else self.starts

    async def start(self) -> None:
        await super().start()
        if self.starts in self.ends:
            self.killed.set_result(self.ends[self.starts])


async def _two_rolled(monkeypatch: pytest.MonkeyPatch, first: Rolled, second: Rolled) -> str:
    """What the roll of both ended with."""
    monkeypatch.setattr(service, "FIRST_PAUSE_S", 0.0)
    stop, supervisor = asyncio.Event(), Supervisor([first, second], 1.0, lambda process: None)
    running = asyncio.create_task(supervisor.run(stop))
    await until(lambda: first.state == second.state == "ready", "both ready")
    async with asyncio.timeout(WITHIN_S):
        failed = await supervisor.roll()
    stop.set()
    await running
    return failed


async def test_a_roll_ends_when_all_are_ready_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Rolled("a"), Rolled("b")
    assert await _two_rolled(monkeypatch, first, second) == ""
    assert (first.starts, second.starts) == (2, 2)


@pytest.mark.parametrize(("code", "said"), [(78, "starts again"), (-9, "signal 9, starts again"), (3, "not started")])
async def test_a_roll_ends_at_a_process_that_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    """A new model that does not load costs one worker, not all."""
    first, second = Rolled("a", {2: code}), Rolled("b")
    failed = await _two_rolled(monkeypatch, first, second)
    assert failed.startswith("a ended with")
    assert said in failed
    assert second.starts == 1


async def test_a_roll_asked_for_during_one_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What changed on disk meanwhile is read by all."""
    child, stop = Rolled("a"), asyncio.Event()
    supervisor = Supervisor([child], 1.0, lambda process: None)
    running = asyncio.create_task(supervisor.run(stop))
    await until(lambda: child.state == "ready", "ready")
    first = supervisor.roll()
    await until(lambda: child.starts == 2, "rolls")
    second = supervisor.roll()
    assert second is not first
    assert supervisor.roll() is second
    async with asyncio.timeout(WITHIN_S):
        assert (await first, await second) == ("", "")
    assert child.starts == 3
    stop.set()
    await running
