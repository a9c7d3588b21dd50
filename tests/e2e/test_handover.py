"""Real workers: prefix KV move with their lanes, when a worker joins and when one leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np

from relaygr_stream.client import RelayClient
from relaygr_stream.client.answers import Ranking
from relaygr_stream.models.api import relative_deviation
from relaygr_stream.settings.schema import Client, Kafka
from relaygr_stream.settings.worker import Handover
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.messages import RankingRequest
from relaygr_stream.wire.topic_files import lane_of
from tests.e2e.fleet import Fleet
from tests.waiting import until

USERS = 24
TOKENS = 200


def request(user: int, number: int, mode: str = "auto") -> RankingRequest:
    rng = np.random.default_rng(user)
    times = np.cumsum(rng.integers(1, 1000, TOKENS))
    return RankingRequest(
        request_id=f"{mode}-{user}-{number}",
        user_id=f"user-{user}",
        prefix=Behaviours.from_arrays(rng.integers(0, 5000, TOKENS), rng.integers(1, 4, TOKENS), times),
        candidates=pack_items(np.arange(20)),
        mode=mode,  # type: ignore[arg-type]
    )


async def rank_all(client: RelayClient, number: int, mode: str = "auto") -> dict[int, Ranking]:
    answers = await asyncio.gather(*(client.rank(request(user, number, mode), timeout=30.0) for user in range(USERS)))
    return dict(enumerate(answers))


def given(fleet: Fleet, name: str, way: str) -> int:
    wanted = "relaygr_handover_entries_total", {"way": way}
    return sum(int(one.value) for one in fleet.children[name].samples() if (one.name, one.labels) == wanted)


def handing_over(fleet: Fleet) -> Fleet:
    """Before it is entered: with a secret, and without hedges, so that each lane's owner answers."""
    fleet.settings = msgspec.structs.replace(
        fleet.settings,
        handover=Handover(secret="of these tests alone"),
        client=Client(hedge_ms=0.0, silence_ms=60_000.0),
    )
    return fleet


async def test_prefix_kv_move_with_their_lanes(kafka_settings: Kafka, tmp_path: Path) -> None:
    async with handing_over(Fleet(kafka_settings, tmp_path)) as fleet:
        fleet.start("worker", "w1")
        await fleet.ready("w1")
        await fleet.lanes_settled("w1")
        async with RelayClient(settings=fleet.settings) as client:
            await rank_all(client, 1)
            fleet.start("worker", "w2")
            await fleet.ready("w2")
            await fleet.lanes_settled("w1", "w2")
            lanes = {lane.lane for lane in fleet.statuses["w2"].lanes}
            moved = {user for user in range(USERS) if lane_of(f"user-{user}", fleet.topics.lanes) in lanes}
            assert moved
            await until(lambda: given(fleet, "w2", "taken") >= len(moved), "entries of the moved users")

            joined = await rank_all(client, 2)
            assert {joined[user].worker for user in moved} == {"w2"}
            assert all(joined[user].outcome in ("hbm", "dram") for user in range(USERS))
            assert sum(answer.timings.computed_tokens for answer in joined.values()) == 0

            fleet.children["w1"].terminate()
            assert await fleet.children["w1"].wait() == 0, fleet.children["w1"].log_tail()
            assert "all lanes handed over" in fleet.children["w1"].log.read_text()
            await fleet.lanes_settled("w2")
            await until(lambda: given(fleet, "w2", "taken") >= USERS, "entries of all users")
            left = await rank_all(client, 3)
            assert {answer.worker for answer in left.values()} == {"w2"}
            assert sum(answer.timings.computed_tokens for answer in left.values()) == 0

            truth = await rank_all(client, 4, mode="full")
        for user in range(USERS):
            for answers in (joined, left):
                assert relative_deviation(answers[user].scores, truth[user].scores) <= 1e-5


async def test_who_leaves_hands_over_to_one_that_has_just_started(kafka_settings: Kafka, tmp_path: Path) -> None:
    """It has no lanes yet when the only owner is told to stop, and may need a while to get them."""
    fleet = handing_over(Fleet(kafka_settings, tmp_path))
    fleet.settings = msgspec.structs.replace(
        fleet.settings, worker=msgspec.structs.replace(fleet.settings.worker, drain_ms=60_000)
    )
    async with fleet:
        fleet.start("worker", "w1")
        await fleet.ready("w1")
        await fleet.lanes_settled("w1")
        async with RelayClient(settings=fleet.settings) as client:
            await rank_all(client, 1)
            fleet.start("worker", "w2")
            await until(lambda: "w2" in fleet.statuses, "its first status")
            fleet.children["w1"].terminate()
            assert await fleet.children["w1"].wait() == 0, fleet.children["w1"].log_tail()
            assert "all lanes handed over" in fleet.children["w1"].log.read_text()
            await fleet.ready("w2")
            await fleet.lanes_settled("w2")
            await until(lambda: given(fleet, "w2", "taken") >= USERS, "entries of all users")
            answers = await rank_all(client, 2)
            assert {answer.worker for answer in answers.values()} == {"w2"}
            assert sum(answer.timings.computed_tokens for answer in answers.values()) == 0
