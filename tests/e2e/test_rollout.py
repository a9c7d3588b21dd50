"""`relaygr rollout` with real processes and traffic: a good model gets all users, a bad one stops at the canary."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from relaygr_stream.bus.routes import read_routes
from relaygr_stream.client import RelayClient
from relaygr_stream.errors import RelayError
from relaygr_stream.settings.schema import Client, Kafka
from relaygr_stream.wire.routes import POSITIONS
from relaygr_stream.wire.worker_status import StatusReader
from tests.e2e.fleet import Fleet, serving_fleet
from tests.waiting import until

pytestmark = pytest.mark.stack
USERS = 400
CANDIDATES = 20
#: So many send at a time, each with a pause behind an answer: both workers are asked, neither is overloaded. A longer
#: one while processes start, which need the machine.
AT_ONCE = 16
PAUSE_S, LONG_PAUSE_S = 0.5, 4.0


class Traffic:
    """Requests of many users, and their answers by the model's version."""

    def __init__(self, relay: RelayClient) -> None:
        self._relay = relay
        self.versions: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.total = 0
        self._begun = itertools.count()
        self._by_user: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
        self._pause_s = LONG_PAUSE_S

    def hurry(self) -> None:
        """From now on answers are waited for."""
        self._pause_s = PAUSE_S

    def calm(self) -> None:
        """From now on processes start."""
        self._pause_s = LONG_PAUSE_S

    async def more(self, count: int) -> None:
        """Until so many more are answered."""
        goal = self.total + count
        await until(lambda: self.total > goal, "answers")

    def most_changes(self) -> int:
        """Of the model's version, for one user, in the order in which the user's requests began."""
        versions = ([version for _, version in sorted(answers)] for answers in self._by_user.values())
        return max(sum(one != other for one, other in itertools.pairwise(each)) for each in versions)

    async def run(self, seed: int) -> None:
        choice = random.Random(seed)
        for number in itertools.count():
            user = choice.randrange(USERS)
            length = 20 + user % 50
            items = [1 + (user * 31 + index) % 4999 for index in range(length)]
            history = (items, [1] * length, [1000 * index for index in range(length)])
            candidates = [choice.randrange(1, 5000) for _ in range(CANDIDATES)]
            try:
                name, begun = f"{seed}-{number}", next(self._begun)
                async with self._relay.request(f"u{user}", history, candidates=CANDIDATES, request_id=name) as request:
                    ranking = await request.rank(candidates, timeout=60)
                self.versions[ranking.model_version] += 1
                self._by_user[user].append((begun, ranking.model_version))
            except RelayError as error:
                self.errors[f"{type(error).__name__}: {error}"[:200]] += 1
            self.total += 1
            await asyncio.sleep(self._pause_s)


@contextlib.asynccontextmanager
async def traffic(fleet: Fleet) -> AsyncIterator[Traffic]:
    settings = msgspec.structs.replace(fleet.settings, client=Client(timeout_ms=60_000))
    async with RelayClient(settings=settings) as relay:
        found = Traffic(relay)
        running = [asyncio.create_task(found.run(seed)) for seed in range(AT_ONCE)]
        try:
            yield found
        finally:
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)


class Command:
    """`relaygr rollout` as a process, and what it printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.text = ""

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.text += line.decode()

    async def said(self, text: str) -> None:
        """Until it has printed this, or has ended."""
        await until(lambda: text in self.text or self.process.returncode is not None, text)


@contextlib.asynccontextmanager
async def rollout(fleet: Fleet, folder: Path, *arguments: str) -> AsyncIterator[Command]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "relaygr_stream", "rollout", "--config", str(folder / "settings.toml"), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    command = Command(process)
    reading = asyncio.create_task(command.read())
    try:
        yield command
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
        await reading
        print(command.text[-6000:])  # what a failed test shows


#: A user's model that computes as the one in model.checkpoint, and more slowly.
SLOW: Final = """
import time
from relaygr_stream.models.loading import load_checkpoint

def make(model, device, dtype):
    made = load_checkpoint(model.checkpoint)
    made.place(device, dtype, "torch")
    score = made.score

    def slowly(batch):
        time.sleep(0.25)
        return score(batch)

    made.score = slowly
    return made
"""


class Bad(NamedTuple):
    """A model that is stopped for this reason, before any user moves or at the canary."""

    name: str
    reason: str
    canary: bool
    factor: float = 1.0
    items_shuffled: bool = False
    slow: bool = False


#: The judgement's and the comparison's own tests have these in seconds (tests/unit/rollout).
BAD: Final = (
    Bad("overflow", "failed or were rejected", canary=False, factor=1e38),
    Bad("vocabulary", "in another order", canary=False, items_shuffled=True),
    Bad("slow", "P99 of", canary=True, slow=True),
)


def changed_model(folder: Path, name: str, factor: float, *, items_shuffled: bool = False) -> str:
    """The fleet's model, whose scores are so many times as large, or which takes item ids for others."""
    (original,) = (path.parent for path in folder.glob("model-*/config.json"))
    copy = folder / name
    shutil.copytree(original, copy)
    (weights,) = copy.glob("*.safetensors")
    tensors = load_file(weights)
    changed = {key: value * factor if key.startswith("head.") else value for key, value in tensors.items()}
    assert any(key.startswith("head.") for key in tensors)
    if items_shuffled:
        table = changed["embedding.item"]
        changed["embedding.item"] = table[torch.randperm(len(table), generator=torch.manual_seed(1))]
    save_file(changed, weights)
    return str(copy)


async def share(fleet: Fleet) -> int:
    routes = (await read_routes(fleet.settings.kafka, fleet.topics, StatusReader())).get("")
    return 0 if routes is None else routes.share_of("next")


async def stopped(fleet: Fleet, folder: Path, asked: Traffic, bad: Bad, *more: str) -> None:
    """Roll this model out: nobody gets an error, and all users are where they were."""
    checkpoint = changed_model(folder, bad.name, bad.factor, items_shuffled=bad.items_shuffled)
    arguments = ("--checkpoint", checkpoint, "--canary", "50%", "--steps", "100", "--hold", "1h", "--cold")
    async with rollout(fleet, folder, *arguments, *more) as command:
        await command.said("group next serves")
        asked.hurry()
        code = await command.process.wait()
        await until(lambda: "the users came back" in command.text or "nobody moved" in command.text)
    assert code == 1
    assert re.search(bad.reason, command.text), bad.name
    assert ("step 1 of 2" in command.text) is bad.canary, bad.name
    assert "step 2 of 2" not in command.text
    assert await share(fleet) == 0
    await asked.more(100)
    assert asked.errors == {}


@pytest.mark.long
async def test_bad_models_are_stopped_at_the_canary_or_before(embedded_settings: Kafka, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    slowly = ("--set", "model.factory=slow:make", "--set", f"model.path={tmp_path}")
    async with serving_fleet(embedded_settings, tmp_path, "w") as fleet, traffic(fleet) as asked:
        for bad in BAD:
            await stopped(fleet, tmp_path, asked, bad, *(slowly if bad.slow else ()))


async def test_a_bad_model_stops_at_the_canary_and_a_good_one_gets_all_users(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    """With more lanes, too, and nobody gets an error; when its processes end, the former ones answer again."""
    async with serving_fleet(embedded_settings, tmp_path, "w") as fleet, traffic(fleet) as asked:
        lanes = ("--lanes", str(2 * fleet.topics.lanes))
        bad = Bad("scale", "another distribution", canary=True, factor=30.0)
        await stopped(fleet, tmp_path, asked, bad, *lanes)
        version = fleet.statuses["w"].model_version
        asked.versions.clear()
        asked.calm()
        good = changed_model(tmp_path, "good", 1.0001)
        arguments = ("--checkpoint", good, "--canary", "40%", "--steps", "100", "--hold", "1s")
        async with rollout(fleet, tmp_path, *arguments, *lanes) as command:
            await command.said("group next serves")
            asked.hurry()
            for step in ("step 1 of 2", "step 2 of 2", "done: all users"):
                await command.said(step)  # one bound for each: on a busy machine all of it takes minutes
            assert command.process.returncode is None
            assert await share(fleet) == POSITIONS
            assert len(asked.versions) == 2
            assert re.search(r"[1-9]\d* of \d+ users lately seen who move now have prefix KV", command.text)
            before, old = asked.total, asked.versions[version]
            await until(lambda: asked.total > before + 100)
            assert asked.versions[version] <= old + AT_ONCE
            assert asked.errors == {}
            command.process.send_signal(signal.SIGINT)
            assert await command.process.wait() == 0
        old = asked.versions[version]
        await until(lambda: asked.versions[version] > old + 50, "the former workers answer")
        assert asked.errors == {}  # what was in the log of the group that ended is asked again


#: A rollout of a model as good, which stays in its first step.
HALF = ("--canary", "50%", "--steps", "100", "--hold", "1h", "--cold", "--unlike")


async def test_killed_in_its_first_step_it_is_taken_back_or_goes_on(embedded_settings: Kafka, tmp_path: Path) -> None:
    """Its processes end with it, and the former group answers its users until one of the two is done."""
    async with serving_fleet(embedded_settings, tmp_path, "w") as fleet, traffic(fleet) as asked:
        arguments = ("--checkpoint", changed_model(tmp_path, "good", 1.0001), *HALF)
        version = fleet.statuses["w"].model_version
        for back in (True, False):
            async with rollout(fleet, tmp_path, *arguments) as killed:
                await killed.said("group next serves")
                asked.hurry()
                await killed.said("step 1 of 2")
                asked.versions.clear()
                await until(lambda: len(asked.versions) == 2, "both groups answer")
                killed.process.kill()
                await killed.process.wait()
            assert await share(fleet) == POSITIONS // 2
            old = asked.versions[version]
            await until(lambda old=old: asked.versions[version] > old + 200, "the former group answers")  # type: ignore[misc]
            asked.calm()
            async with rollout(fleet, tmp_path, *(("--back",) if back else arguments)) as later:
                if back:
                    assert await later.process.wait() == 0
                    assert await share(fleet) == 0
                else:
                    await later.said("step 2 of 2")
                    assert await share(fleet) == POSITIONS
        await asked.more(50)
        assert asked.errors == {}


async def test_of_two_begun_at_once_one_goes_on_and_is_taken_back(embedded_settings: Kafka, tmp_path: Path) -> None:
    async with serving_fleet(embedded_settings, tmp_path, "w") as fleet, traffic(fleet) as asked:
        arguments = ("--checkpoint", changed_model(tmp_path, "good", 1.0001), *HALF)
        async with rollout(fleet, tmp_path, *arguments) as first:
            await first.said("rollout from group")
            async with rollout(fleet, tmp_path, *arguments) as second:
                both = {first, second}
                await until(lambda: any("step 1" in each.text for each in both), "a step")
                (one,) = (each for each in both if "step 1" in each.text)
                (other,) = both - {one}
                why = re.compile("another command has changed the routes|has workers already")
                await until(lambda: why.search(other.text), "why the other one ends")
                assert await other.process.wait() == 1
                assert await share(fleet) == POSITIONS // 2
                await asked.more(100)
                async with rollout(fleet, tmp_path, "--back") as back:
                    assert await back.process.wait() == 0
                await until(lambda: why.search(one.text), "why it ends")
                assert await one.process.wait() == 1
        assert await share(fleet) == 0
        assert asked.errors == {}
