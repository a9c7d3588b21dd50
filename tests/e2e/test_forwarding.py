"""A lane that is too much for its worker, with real processes: other workers answer, in full, each request once."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from pathlib import Path

import msgspec

from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.client import Ranking, RelayClient
from relaygr_stream.errors import Overloaded
from relaygr_stream.models.api import relative_deviation
from relaygr_stream.settings.schema import Client, Kafka
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import RankingRequest, ScoreReply
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import lane_of
from tests.e2e.fleet import Fleet, traffic
from tests.waiting import until

#: A worker that is busy for less of its time has room for another's rankings.
SPARE_SHARE = 0.3


class Ledger:
    """Every copy of a request, and every answer."""

    def __init__(self) -> None:
        self.hops: defaultdict[str, list[int]] = defaultdict(list)
        self.answers: Counter[str] = Counter()

    def on_rankings(self, records: list[Record]) -> None:
        for record in records:
            request = decode(RankingRequest, record.value)
            self.hops[request.request_id].append(request.hops)

    def on_scores(self, records: list[Record]) -> None:
        self.answers.update(decode(ScoreReply, record.value).request_id for record in records)


async def test_an_overloaded_workers_requests_get_scores_from_another(kafka_settings: Kafka, tmp_path: Path) -> None:
    async with Fleet(kafka_settings, tmp_path) as fleet:
        # A queue of one makes w1 refuse what comes while a ranking waits.
        fleet.start("worker", "w1", "worker.max_queue=1")
        fleet.start("worker", "w2")
        await fleet.ready("w1", "w2")
        await fleet.lanes_settled("w1", "w2")
        topics, ledger = fleet.topics, Ledger()
        hot = {lane.lane for lane in fleet.statuses["w1"].lanes}
        requests = [
            item.request for item in traffic(seconds=4, rate=60) if lane_of(item.request.user_id, topics.lanes) in hot
        ]
        outcomes: list[Ranking | BaseException] = []
        async with (
            TopicTail(kafka_settings, topics.ranking.name, range(topics.lanes), "latest", ledger.on_rankings),
            TopicTail(kafka_settings, topics.scores.name, range(topics.scores.partitions), "latest", ledger.on_scores),
            # Hedges would be copies, too.
            RelayClient(settings=msgspec.structs.replace(fleet.settings, client=Client(hedge_ms=0))) as client,
        ):
            for wave in batched(requests, 8):
                ranked = (client.rank(request, timeout=20.0) for request in wave)
                outcomes += await asyncio.gather(*ranked, return_exceptions=True)
                # Not busy all the time: w2, too, refuses then, as it should.
                await until(lambda: fleet.statuses["w2"].busy_share < SPARE_SHARE, "w2 at rest")
            answers = [
                (request, outcome)
                for request, outcome in zip(requests, outcomes, strict=True)
                if isinstance(outcome, Ranking)
            ]
            # A status from the middle of a wave says that w2 is busy; what comes later in the wave has nowhere to go.
            others = [outcome for outcome in outcomes if not isinstance(outcome, Ranking | Overloaded)]
            assert not others, others
            by = Counter(answer.worker for _, answer in answers)
            assert by["w2"] >= len(requests) // 4, by
            hops = ledger.hops
            # The ledger reads on its own, and may be behind the client.
            await until(lambda: ledger.answers.total() >= len(requests), "all answers")
            await until(
                lambda: all(
                    hops[request.request_id] and (len(hops[request.request_id]) == 2) == (answer.worker == "w2")
                    for request, answer in answers
                ),
                "all copies",
            )
            assert ledger.answers == {request.request_id: 1 for request in requests}
            for request, _ in answers:
                copies = hops[request.request_id]
                assert sorted(copies) == list(range(len(copies)))  # one copy of each hop, and no other
                assert len(copies) <= 3
            for request, answer in answers:
                if answer.worker == "w2":
                    truth = await client.rank(msgspec.structs.replace(request, mode="full"), timeout=20.0)
                    assert relative_deviation(answer.scores, truth.scores) <= 1e-5
        passed_on = sum(copies.count(1) for copies in hops.values())  # those that were refused in the end included
        sent, read = (
            f'relaygr_forwards_total{{result="sent"}} {passed_on}.0',
            f'relaygr_rankings_read_total{{hops="1"}} {passed_on}.0',
        )
        await until(lambda: sent in fleet.children["w1"].metrics(), sent)
        await until(lambda: read in fleet.children["w2"].metrics(), read)


def batched(requests: list[RankingRequest], size: int) -> list[list[RankingRequest]]:
    return [requests[start : start + size] for start in range(0, len(requests), size)]
