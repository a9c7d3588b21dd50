"""Prefix KV that a lane's owner has no room for, with real processes: another worker does, and ranks; then it dies."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import msgspec
import numpy as np

from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.client import Ranking, RelayClient
from relaygr_stream.models.api import relative_deviation
from relaygr_stream.settings.schema import Client, Kafka
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import RankingRequest
from relaygr_stream.wire.records import Record, kind_of
from relaygr_stream.wire.refusals import KIND, decode_refusals
from relaygr_stream.wire.topic_files import lane_of
from tests.e2e.fleet import LONG_LIVED, Fleet
from tests.waiting import until

#: What a visit states. Even on a crowded machine, the trigger decides long before.
RANK_IN_S = 5.0
#: A visit waits so long for the trigger's word on it, which does not come where the owner was silent for a moment.
WORD_S = 10.0
#: From the word on the log to the ranking: the owner reads it in milliseconds.
HEAD_START_S = 0.5
CANDIDATES = np.arange(20)
#: Of a history's prefix KV, and a share of HBM that has room for two of them, and for the longest prefix.
PREFIX_BYTES, SMALL_SHARE = 150 * 512, 0.011


class Copies:
    """The hops of every copy of a ranking, the kinds of other records, and the requests that their owner is told of."""

    def __init__(self) -> None:
        self.hops: defaultdict[str, list[int]] = defaultdict(list)
        self.kinds: list[str] = []
        self.told: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def take(self, records: list[Record]) -> None:
        for record in records:
            if kind := kind_of(record.headers):
                self.kinds.append(kind)
            else:
                request = decode(RankingRequest, record.value)
                self.hops[request.request_id].append(request.hops)

    def hear(self, records: list[Record]) -> None:
        for record in records:
            if kind_of(record.headers) == KIND:
                for requests in decode_refusals(record.value).reasons.values():
                    for request_id in requests:
                        self.told[request_id].set()


def history(user: str) -> Behaviours:
    random = np.random.default_rng(list(user.encode()))
    return Behaviours.from_arrays(random.integers(0, 5000, 150), np.zeros(150, int), np.arange(150))


async def test_a_delegate_computes_and_ranks_and_a_dead_one_costs_a_full_inference(
    kafka_settings: Kafka, tmp_path: Path
) -> None:
    async with Fleet(kafka_settings, tmp_path) as fleet:
        fleet.use(msgspec.structs.replace(fleet.settings, relay=LONG_LIVED))
        fleet.start("trigger", "trigger")
        fleet.start("worker", "w1", f"worker.pinned_share={SMALL_SHARE}")
        fleet.start("worker", "w2")
        await fleet.ready("trigger", "w1", "w2")
        await fleet.lanes_settled("w1", "w2")
        await fleet.owners_known()
        topics, copies = fleet.topics, Copies()
        own = {lane.lane for lane in fleet.statuses["w1"].lanes}
        users = [user for n in range(200) if lane_of(user := f"user-{n}", topics.lanes) in own][:26]
        trigger, owner, delegate = (fleet.children[name] for name in ("trigger", "w1", "w2"))
        async with (
            AsyncExitStack() as stack,
            TopicTail(kafka_settings, topics.ranking.name, range(topics.lanes), "latest", copies.take),
            TopicTail(kafka_settings, topics.pre_infer.name, range(topics.lanes), "latest", copies.hear),
            # Hedges would be copies, too.
            RelayClient(settings=msgspec.structs.replace(fleet.settings, client=Client(hedge_ms=0))) as client,
        ):

            async def visit(user: str, after: asyncio.Event | None = None) -> Ranking:
                async with client.request(
                    user, history(user), candidates=20, rank_in=RANK_IN_S, request_id=user
                ) as request:
                    await (told(user) if after is None else after.wait())
                    return await request.rank(CANDIDATES, timeout=30.0)

            async def told(user: str) -> None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(copies.told[user].wait(), WORD_S)
                await asyncio.sleep(HEAD_START_S)

            async def check(answer: Ranking, user: str) -> None:
                whole = RankingRequest(
                    request_id=f"{user}-truth", user_id=user, prefix=history(user),
                    candidates=pack_items(CANDIDATES), mode="full",
                )  # fmt: skip
                truth = await client.rank(whole, timeout=30.0)
                assert relative_deviation(answer.scores, truth.scores) <= 1e-5

            for filler in users[24:]:  # the owner has no room from now on
                await stack.enter_async_context(client.request(filler, history(filler), candidates=20))
            await until(lambda: fleet.pinned() >= 2 * PREFIX_BYTES, "the owner is full")
            answers = {user: await visit(user) for user in users[:16]}
            for user, answer in answers.items():
                await check(answer, user)
            passed_on = {user for user, answer in answers.items() if answer.worker == "w2"}
            seen = {user: (answer.outcome, answer.admission) for user, answer in answers.items()}
            hits = {user for user in passed_on if seen[user] in (("hbm", "delegated"), ("joined", "delegated"))}
            # A statement that is late on a crowded machine, or a ranking before the word on it, costs a full inference.
            assert len(hits) >= 12, {user: (answers[user].worker, *seen[user]) for user in answers}
            # The tail reads lane by lane, and may be behind the client.
            wanted = {user: [0, 1] if user in passed_on else [0] for user in answers}
            await until(lambda: {user: sorted(copies.hops[user]) for user in answers} == wanted, f"copies: {wanted}")
            assert copies.kinds.count("delegated") >= len(hits)
            await until(lambda: 'relaygr_trigger_decisions_total{reason="delegated"}' in trigger.metrics())
            forwarded = f'relaygr_forwards_total{{result="delegate"}} {len(passed_on)}.0'
            await until(lambda: forwarded in owner.metrics(), forwarded)
            await until(lambda: fleet.statuses["w2"].counters["signal_delegated"] >= len(hits), "w2 tells of them")

            before = fleet.statuses["w2"].counters["signal_delegated"]
            dead = asyncio.Event()
            late = [asyncio.create_task(visit(user, dead)) for user in users[16:24]]
            await until(lambda: fleet.statuses["w2"].counters["signal_delegated"] > before, "w2 has some of them")
            delegate.kill()
            dead.set()
            for user, answer in zip(users[16:24], await asyncio.gather(*late), strict=True):
                assert (answer.worker, answer.outcome in ("full", "joined", "hbm")) == ("w1", True)
                await check(answer, user)
