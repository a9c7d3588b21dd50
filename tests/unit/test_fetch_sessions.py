"""A broker with a fetch session knows of the same partitions and offsets as one that is told all of them each time."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.cluster import ClusterMetadata
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.consumer.subscription_state import Assignment
from aiokafka.protocol.fetch import FetchRequest, FetchRequest_v4, FetchRequest_v7, FetchRequest_v11
from aiokafka.structs import PartitionMetadata

from relaygr_stream.bus.aiokafka_patches import ClientId
from relaygr_stream.bus.fetch_sessions import (
    LEAST_PARTITIONS,
    MAX_EPOCH,
    FetchSession,
    _fetches,
    _get_actions_per_node,
    get_actions_per_node,
)

NOT_FOUND, INVALID_EPOCH = 70, 71
Told = dict[tuple[str, int], int]


class SessionBroker:
    """Kafka's side of KIP-227, for one consumer. room: whether it makes sessions."""

    def __init__(self) -> None:
        self.room = True
        self.id = self.epoch = 0
        self.told: Told = {}
        self.named = 0  # partitions in the last request

    def answer(self, request: Any) -> SimpleNamespace:
        named = {(topic, each[0]): each[2] for topic, partitions in request.topics for each in partitions}
        self.named = len(named)
        if request.session_epoch <= 0:
            self.told = named
            self.id = self.id + 1 if self.room and request.session_epoch == 0 else 0
            self.epoch = 1
            return SimpleNamespace(error_code=0, session_id=self.id, topics=[])
        if not self.id or request.session_id != self.id:
            return SimpleNamespace(error_code=NOT_FOUND, session_id=0, topics=[])
        if request.session_epoch != self.epoch:
            return SimpleNamespace(error_code=INVALID_EPOCH, session_id=self.id, topics=[])
        self.epoch = self.epoch % MAX_EPOCH + 1
        for topic, partitions in request.forgotten_topics_data:
            for partition in partitions:
                del self.told[topic, partition]
        self.told.update(named)
        return SimpleNamespace(error_code=0, session_id=self.id, topics=[])


def fetch_of(wanted: Told) -> FetchRequest:
    topics: dict[str, list[tuple[int, int, int]]] = {}
    for (topic, partition), offset in wanted.items():
        topics.setdefault(topic, []).append((partition, offset, 1 << 20))
    return FetchRequest(500, 1, 1 << 22, 0, list(topics.items()))


def everything(lanes: int = 16) -> Told:
    return {(topic, lane): 100 for topic in ("pre-infer", "ranking") for lane in range(lanes)}


def send(session: FetchSession, broker: SessionBroker, wanted: Told, *, lost: bool = False) -> Any:
    request = session.request(fetch_of(wanted))
    answer = broker.answer(request.build(FetchRequest_v11))
    if not lost:
        session.answered(request, answer)
    return answer


def test_only_what_has_changed_is_named() -> None:
    session, broker, wanted = FetchSession(), SessionBroker(), everything()
    send(session, broker, wanted)
    assert broker.named == len(wanted)
    send(session, broker, wanted)
    assert broker.named == 0
    wanted["ranking", 3] += 1
    send(session, broker, wanted)
    assert (broker.named, broker.told) == (1, wanted)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_broker_knows_what_is_wanted(seed: int) -> None:
    """Positions move, partitions come and go, answers are lost, the broker forgets the session or has no room."""
    draw, session, broker, wanted = random.Random(seed), FetchSession(), SessionBroker(), everything()
    new = True  # the broker may not know the session
    for _ in range(400):
        for each in draw.sample(list(wanted), min(len(wanted), draw.choice((0, 1, 3)))):
            wanted[each] += 1
        if draw.random() < 0.1:
            wanted = {each: wanted.get(each, 100) for each in everything() if draw.random() < draw.choice((0.1, 0.9))}
        if draw.random() < 0.05:
            broker.id, broker.room, new = 0, draw.random() < 0.7, True
        if draw.random() < 0.05:
            broker.epoch, new = 7, True
        if draw.random() < 0.02 and broker.id and session._epoch:
            session._epoch = broker.epoch = MAX_EPOCH
        lost = draw.random() < 0.1
        if len(wanted) < LEAST_PARTITIONS:
            request = session.request(fetch_of(wanted))
            built = request.build(FetchRequest_v11)
            assert (built.session_id, built.session_epoch) == (0, -1), "not worth a session"
            session.answered(request, broker.answer(built))
            new = False
            continue
        answer = send(session, broker, wanted, lost=lost)
        assert new or not answer.error_code, "it begins anew at once"
        new = bool(answer.error_code) and lost
        if not answer.error_code:
            assert broker.told == wanted


def test_a_broker_without_sessions_is_told_all() -> None:
    session, wanted = FetchSession(), everything()
    for version in (FetchRequest_v4, FetchRequest_v4):
        request = session.request(fetch_of(wanted))
        built: Any = request.build(version)
        assert sum(len(partitions) for _, partitions in built.topics) == len(wanted)
        session.answered(request, SimpleNamespace(topics=[]))
    built = session.request(fetch_of(wanted)).build(FetchRequest_v7)
    assert (built.session_id, built.session_epoch) == (0, 0)


class Waiting:
    """What was read of a partition, and is not yet handed out."""

    def __init__(self, backoff_s: float) -> None:
        self.calculate_backoff = lambda: backoff_s


@pytest.mark.parametrize("seed", range(200))
async def test_the_same_partitions_are_fetched_as_by_aiokafka(seed: int) -> None:
    draw = random.Random(seed)
    rare = draw.random() < 0.5  # something out of the ordinary
    partitions = [
        TopicPartition(topic, lane) for topic in ("pre-infer", "ranking") for lane in range(draw.choice((1, 8)))
    ]
    cluster, assignment = ClusterMetadata(), Assignment(partitions)
    for each in partitions:
        leader = draw.choice((-1, 0, 1, 2)) if rare else draw.randrange(3)
        metadata = PartitionMetadata(*each, leader, [], [], None)
        if not rare or draw.random() < 0.9:
            cluster._partitions.setdefault(each.topic, {})[each.partition] = metadata
        state = assignment.state_value(each)
        if not rare or draw.random() < 0.9:
            state.seek(draw.randrange(100))
        if rare and draw.random() < 0.1:
            state.pause()
    waits = [each for each in partitions if draw.random() < draw.choice((0.0, 0.2))]
    fetcher: Any = SimpleNamespace(
        _client=SimpleNamespace(_client_id=ClientId("c"), cluster=cluster),
        _client_rack=None,
        _preferred_read_replica={},
        _records={each: Waiting(draw.choice((0.0, 0.1) if rare else (0.1, 0.3))) for each in waits},
        _in_flight={node for node in range(3) if draw.random() < 0.3},
        _max_partition_fetch_bytes=1 << 20,
        _fetch_max_wait_ms=500,
        _fetch_min_bytes=1,
        _fetch_max_bytes=1 << 22,
        _isolation_level=0,
        _fetcher_timeout=5.0,
    )
    fetcher._select_read_replica = partial(Fetcher._select_read_replica, fetcher)

    def plain(found: Any) -> Any:
        requests, resets, pause_s, unknown, resumes = found
        fetches = {(node, topic, *each) for node, one in requests for topic, several in one.topics for each in several}
        return len(requests), fetches, dict(resets), pause_s, unknown, set(resumes)

    ours, theirs = get_actions_per_node(fetcher, assignment), _get_actions_per_node(fetcher, assignment)
    assert plain(ours) == plain(theirs)
    assert rare or _fetches(fetcher, assignment) is not None, "the common case"
