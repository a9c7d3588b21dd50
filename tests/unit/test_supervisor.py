"""What the supervisor does with a process that says it is not well. Its health is scripted, its end is a future."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from relaygr_stream.ops import supervisor as service
from relaygr_stream.ops.supervisor import PROBES_UNTIL_HUNG, Health, Supervised, Supervisor
from tests.waiting import until

READY, STUCK = Health(None, None), Health("stuck", "stuck")


class Scripted(Supervised):
    """Says what the script says, its last word for ever; a kill ends it."""

    def __init__(self, script: list[Health]) -> None:
        super().__init__("scripted", (), Path())
        self.script = script
        self.asked = 0
        self.starts = 0
        self.killed: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        self.starts += 1
        self.killed = asyncio.get_running_loop().create_future()

    async def ended(self) -> int:
        return await asyncio.shield(self.killed)

    async def health(self) -> Health:
        self.asked += 1
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def kill(self) -> None:
        if not self.killed.done():
            self.killed.set_result(-9)

    async def stop(self, within_s: float) -> None:
        self.kill()


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
        await asyncio.wait_for(Supervisor(children, 1.0, defect).run(asyncio.Event()), 10)
    assert all(child.killed.done() for child in children)
