"""Incremental fetches (KIP-227): a fetch names only partitions whose position has changed, its answer those with news.

Importing it patches aiokafka 0.14 for clients with a ClientId. There, each fetch and each answer name all partitions:
with the 128 of a worker of 64 lanes, to write and read both took it 0.9 ms, most of its time at 50 requests/s. To look
which are to be fetched, once for each fetch and once for each answer, took as much again.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final

from aiokafka.client import AIOKafkaClient
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.protocol.fetch import FetchRequest

from relaygr_stream.bus.aiokafka_patches import ClientId

#: The version of fetches from which on they may belong to a session.
FIRST_VERSION: Final = 7
#: Fetches of fewer partitions gain nothing, and a broker has room for 1,000 sessions by default
#: (max.incremental.fetch.session.cache.slots).
LEAST_PARTITIONS: Final = 8
#: The largest epoch (int32); 1 follows.
MAX_EPOCH: Final = 2**31 - 1

#: aiokafka's id of the leader where there is none.
NO_LEADER: Final = -1

#: (topic, partition) → (offset, most bytes).
Partitions = Mapping[tuple[str, int], tuple[int, int]]


class FetchSession:
    """What one broker knows of the partitions that a consumer fetches from it.

    `request` and `answered` follow each other. After a request without an answer, as after an error, the next one names
    all partitions, and begins a session anew.
    """

    def __init__(self) -> None:
        self._id = 0  # 0: the broker has none for us
        self._epoch = 0  # of the next request; 0: it begins a session, and ends the one with this id
        self._known: Partitions = {}

    def request(self, request: FetchRequest) -> FetchRequest:
        """What to send in place of this request for all partitions."""
        wanted = {
            (topic, partition): (offset, size)
            for topic, partitions in request.topics
            for partition, offset, size in partitions
        }
        epoch, known = self._epoch, self._known if self._epoch else {}
        self._epoch, self._known = 0, wanted  # until it is answered
        if len(wanted) < LEAST_PARTITIONS:
            return request
        return _Incremental(request, wanted, known, self._id, epoch)

    def answered(self, request: FetchRequest, answer: Any) -> None:
        """The broker's answer to what `request` returned. It may refuse the session, or have no room for one."""
        session_id = getattr(answer, "session_id", 0)
        if isinstance(request, _Incremental) and session_id and not answer.error_code:
            self._id, self._epoch = session_id, request.epoch % MAX_EPOCH + 1


class _Incremental(FetchRequest):  # type: ignore[misc]  # untyped
    """A fetch within a session. known: what the broker knows of it; epoch 0: nothing."""

    def __init__(self, of: FetchRequest, wanted: Partitions, known: Partitions, session_id: int, epoch: int) -> None:
        super().__init__(
            of._max_wait_ms, of._min_bytes, of._max_bytes, of._isolation_level, of.topics, rack_id=of._rack_id
        )
        self._wanted = wanted
        self._known = known
        self._session_id = session_id
        self.epoch: Final = epoch

    def build(self, request_struct_class: Any) -> Any:
        """As FetchRequest.build, which a broker of an earlier version gets."""
        if request_struct_class.API_VERSION < FIRST_VERSION:
            return super().build(request_struct_class)
        known = self._known
        news = ((one, *each) for one, each in self._wanted.items() if known.get(one) != each)
        self._topics = _by_topic(((topic, (partition, offset, size)) for (topic, partition), offset, size in news))
        built: Any = super().build(request_struct_class)
        built.session_id, built.session_epoch = self._session_id, self.epoch
        built.forgotten_topics_data = _by_topic(known.keys() - self._wanted.keys())
        return built


def _by_topic(found: Iterable[tuple[str, Any]]) -> list[tuple[str, list[Any]]]:
    topics = defaultdict[str, list[Any]](list)
    for topic, each in found:
        topics[topic].append(each)
    return list(topics.items())


_send = AIOKafkaClient.send


async def send(self: Any, node_id: int, request: Any, **options: Any) -> Any:
    """As AIOKafkaClient.send; fetches of our consumers belong to a session."""
    if not (isinstance(request, FetchRequest) and isinstance(self._client_id, ClientId)):
        return await _send(self, node_id, request, **options)
    sessions: dict[int, FetchSession] = self.__dict__.setdefault("_relaygr_sessions", {})
    session = sessions.setdefault(node_id, FetchSession())
    sent = session.request(request)
    answer = await _send(self, node_id, sent, **options)
    session.answered(sent, answer)
    asked = sum(len(partitions) for _, partitions in request.topics)
    if sum(bool(each[1]) for _, partitions in answer.topics for each in partitions) < asked:  # it serves one of them
        self._relaygr_fetched_s = time.monotonic()
    return answer


AIOKafkaClient.send = send

_get_actions_per_node = Fetcher._get_actions_per_node


def get_actions_per_node(self: Any, assignment: Any) -> Any:
    """As Fetcher._get_actions_per_node, in a quarter of the time where each partition has a leader and a position, and
    none is paused. Partitions begin at a random one, where aiokafka shuffles them; within a session the broker takes
    turns."""
    found = _fetches(self, assignment) if isinstance(self._client._client_id, ClientId) else None
    return _get_actions_per_node(self, assignment) if found is None else found


def _fetches(fetcher: Any, assignment: Any) -> Any:
    """What get_actions_per_node returns; None: not so simple."""
    if fetcher._client_rack or fetcher._preferred_read_replica or not assignment.tps:
        return None
    leaders, states = fetcher._client.cluster._partitions, assignment._tp_state
    backoffs = defaultdict[int, list[float]](list)
    fetches = defaultdict[int, dict[str, list[tuple[int, int, int]]]](lambda: defaultdict(list))
    try:
        for partition in fetcher._records.keys() & states.keys():  # what is read, and not yet handed out
            if not (backoff := fetcher._records[partition].calculate_backoff()):
                return None
            backoffs[leaders[partition.topic][partition.partition].leader].append(backoff)
        waiting, most = fetcher._in_flight | backoffs.keys(), fetcher._max_partition_fetch_bytes
        each, first = list(states.items()), random.randrange(len(states))
        for (topic, partition), state in each[first:] + each[:first]:
            leader, position = leaders[topic][partition].leader, state._position
            if leader == NO_LEADER or position is None or state._paused:
                return None
            if leader not in waiting:
                fetches[leader][topic].append((partition, position, most))
    except KeyError:  # a partition of which the cluster's metadata say nothing
        return None
    bounds = fetcher._fetch_max_wait_ms, fetcher._fetch_min_bytes, fetcher._fetch_max_bytes, fetcher._isolation_level
    requests = [(leader, FetchRequest(*bounds, list(topics.items()))) for leader, topics in fetches.items()]
    pause_s = min(map(max, backoffs.values())) if backoffs else fetcher._fetcher_timeout
    return requests, {}, pause_s, False, []


Fetcher._get_actions_per_node = get_actions_per_node


def fetched_s(consumer: Any) -> float:
    """When a broker last answered a fetch of this AIOKafkaConsumer, not with errors alone, by the monotonic clock; 0:
    none has.

    aiokafka's last_poll_timestamp counts only answers that name the partition.
    """
    return float(getattr(consumer._client, "_relaygr_fetched_s", 0.0))
