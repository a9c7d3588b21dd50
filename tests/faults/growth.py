"""`relaygr lanes grow` under load, while the command, a worker and a broker are killed, each at a step of it."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from relaygr_stream.wire.topic_files import lane_of
from tests.faults.cluster import ThreeBrokers
from tests.faults.scene import Scene
from tests.waiting import WITHIN_S, until

#: Lines that the command prints at least, also when it is run again: steps at which something is killed.
STEPS: Final = 3


async def grows_through_kills(cluster: ThreeBrokers, stage: Scene, folder: Path, lanes: int, victim: str) -> None:
    """Run the command until it is done. victim: the worker that is killed. The steps are random, and printed."""
    seed = random.randrange(1 << 16)
    draw = random.Random(seed)
    due = {what: draw.randint(1, STEPS) for what in ("command", "worker", "broker")}
    print(f"seed {seed}: killed at the command's line {due}")
    stage.begins()
    async with asyncio.timeout(WITHIN_S):
        while True:
            command = await _grow(folder, lanes)
            async for number in _lines(command):
                for what in [what for what, step in due.items() if number >= step]:
                    del due[what]
                    if what == "command":
                        with suppress(ProcessLookupError):  # it was just done
                            command.kill()
                    elif what == "worker":
                        await asyncio.to_thread(stage.fleet.children.pop(victim).kill)
                    else:
                        await cluster.brokers[await cluster.leader(stage.fleet.topics.ranking.name)].kill()
                        await cluster.heal()
            if await command.wait() == 0 and not due:
                break
    assert stage.fleet.topics.grow(lanes)
    await stage.witness.follow(lanes)
    await stage.owned(*(name for name in stage.fleet.children if name != "trigger"))
    users = {note.user for note in stage.load.notes}
    await until(
        lambda: all(stage.client.lane(user) == lane_of(user, lanes) for user in users), "the client goes by more lanes"
    )
    stage.ends()


async def _grow(folder: Path, lanes: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-u", "-m", "relaygr_stream", "lanes", "grow", str(lanes)),
        *("--config", str(folder / "settings.toml")),
        stdout=asyncio.subprocess.PIPE,
    )


async def _lines(process: asyncio.subprocess.Process) -> AsyncIterator[int]:
    """The number of each line that it prints, from 1."""
    assert process.stdout is not None
    number = 0
    async for line in process.stdout:
        number += 1
        print(f"{number}: {line.decode().rstrip()}")
        yield number
