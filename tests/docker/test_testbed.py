"""The testbed's containers, seen from outside: a foreign request, a killed worker, and nothing left afterwards.

One testbed for the file; its tests run in the order in which they stand.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
import time
from typing import Any

import confluent_kafka
import msgpack
import pytest
from msgspec.structs import replace

from relaygr_stream.client import RelayClient
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.messages import Outcome
from relaygr_stream.wire.topic_files import lane_of, load_topics
from relaygr_stream.workload.driver import Result, drive
from relaygr_stream.workload.generator import Generator, GeneratorOptions
from tests.docker.conftest import ROOT, Testbed, docker

# Building and starting the containers counts into the first test's time; from nothing, torch is downloaded too.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

HITS: set[Outcome] = {"hbm", "dram", "joined"}


def test_it_shows_scores_being_served(testbed: Testbed) -> None:
    print(testbed.shown)
    assert "worker-1: healthy" in testbed.shown
    assert "outcome=" in testbed.shown
    assert testbed.bootstrap in testbed.shown
    assert testbed.gateway in testbed.shown


def test_no_container_runs_as_root(testbed: Testbed) -> None:
    for service in ("trigger", "worker-1", "worker-2", "gateway", "client"):
        assert docker("exec", testbed.container(service), "id", "-u").strip() != "0"


class ForeignClient:
    """A service in another language, as it were: confluent-kafka and msgpack, and nothing of this package."""

    REPLY_PARTITION = 3

    def __init__(self, bootstrap: str) -> None:
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": bootstrap, "partitioner": "murmur2_random", "linger.ms": 0}
        )
        self._consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "unused", "enable.auto.commit": False}
        )
        scores = confluent_kafka.TopicPartition("relaygr.scores", self.REPLY_PARTITION)
        _, scores.offset = self._consumer.get_watermark_offsets(scores, timeout=10)
        self._consumer.assign([scores])

    def close(self) -> None:
        assert self._producer.flush(10) == 0
        self._consumer.close()

    def announce(self, user: str, event: dict[str, Any]) -> None:
        self._producer.produce("relaygr.retrieval", key=user, value=msgpack.packb(event))
        assert self._producer.flush(10) == 0

    def rank(self, user: str, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        correlation = f"foreign {request['request_id']}".encode()
        headers: dict[str, str | bytes | None] = {
            "relaygr-correlation-id": correlation,
            "relaygr-reply-partition": str(self.REPLY_PARTITION),
        }
        self._producer.produce("relaygr.ranking", key=user, value=msgpack.packb(request), headers=headers)
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            message = self._consumer.poll(left)
            if message is None or dict(message.headers() or []).get("relaygr-correlation-id") != correlation:
                continue
            reply = msgpack.unpackb(message.value())
            assert isinstance(reply, dict)
            return reply
        raise AssertionError(f"no answer to {request['request_id']} within {timeout} s")


def behaviours(items: range, first_ms: int) -> dict[str, bytes]:
    count = len(items)
    return {
        "items": struct.pack(f"<{count}I", *items),
        "actions": bytes([1]) * count,
        "times": struct.pack(f"<{count}q", *(first_ms + 60_000 * index for index in range(count))),
    }


def test_a_foreign_request_gets_its_scores(testbed: Testbed) -> None:
    client = ForeignClient(testbed.bootstrap)
    outcomes = []
    try:
        for attempt in range(10):  # over its budget the trigger passes nothing on, and a busy machine refuses
            user, now = f"foreign-{attempt}", int(time.time() * 1000)
            name = {"v": 1, "request_id": f"request-{attempt}", "user_id": user}
            prefix = behaviours(range(1500), now - 3 * 86_400_000)
            client.announce(user, {**name, "prefix": prefix, "candidates": 20, "sent_ms": now})
            time.sleep(0.5)  # retrieval and pre-processing
            request = {
                **name,
                "prefix": prefix,
                "suffix": behaviours(range(1500, 1508), now - 600_000),
                "candidates": struct.pack("<20I", *range(3000, 3020)),
                "sent_ms": int(time.time() * 1000),
                "timeout_ms": 5000.0,
            }
            reply = client.rank(user, request, timeout=10)
            assert reply["request_id"] == name["request_id"], reply
            if reply["status"] == "overloaded":
                continue
            assert reply["status"] == "ok", reply
            scores = struct.unpack(f"<{20 * len(reply['tasks'])}f", reply["scores"])
            assert len(set(scores)) > 1
            outcomes.append(reply["outcome"])
    finally:
        client.close()
    assert HITS & set(outcomes), f"no foreign event led to a prefix hit: {outcomes}"


def test_a_history_in_redis_is_ranked_over_http(testbed: Testbed) -> None:
    clicks = "user,item,action,time\n" + "".join(f"visitor,{item},1,{1_764_000_000 + item}\n" for item in range(600))
    imported = "cat > /tmp/clicks.csv && relaygr history import /tmp/clicks.csv --tenant testbed"
    docker("exec", "-i", testbed.container("gateway"), "sh", "-c", imported, stdin=clicks)
    (whose, candidates), outcomes = ({"user_id": "visitor"}, [700, 701, 702]), []
    for attempt in range(5):  # as above
        name = {"request_id": f"visit-{attempt}", **whose}
        assert testbed.ask("/v1/announce", {**name, "candidates": 3}) == {"request_id": f"visit-{attempt}"}
        time.sleep(0.5)
        answer = testbed.ask("/v1/rank", {**name, "candidates": candidates})
        assert len(answer["scores"]) == 3
        outcomes.append(answer["outcome"])
    assert HITS & set(outcomes), f"no announcement over HTTP led to a prefix hit: {outcomes}"


def test_prometheus_answers_every_query_of_the_dashboard(testbed: Testbed) -> None:
    """And what the workers and the trigger do shows: Grafana itself is not needed for that."""
    board = json.loads((ROOT / "docker" / "grafana" / "dashboards" / "relay.json").read_text())
    testbed.compose("up", "--detach", "prometheus")
    shown = {
        "Latency at the callers",
        "Rankings of the callers",
        "Ranking latency",
        "Answers",
        "Trigger decisions",
        "Lanes per worker",
        "HBM tier",
        "Queue delay",
    }
    assert shown < {panel["title"] for panel in board["panels"]}
    for panel in board["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "10s").replace("$fleet", "testbed")
            deadline = time.monotonic() + (30 if panel["title"] in shown else 0)
            while not (found := testbed.query(expression)) and time.monotonic() < deadline:
                time.sleep(1)
            assert found or panel["title"] not in shown, f"{panel['title']}: nothing for {expression}"


async def test_a_killed_worker_loses_no_request(testbed: Testbed) -> None:
    """Each request before, meanwhile and after gets one answer or one typed error; then the other worker serves all."""
    load_s, kill_after_s = 20.0, 5.0  # the session timeout is 3 s: the lanes move under load
    options = GeneratorOptions(rate=5.0, length=256, run=f"load{time.time_ns()}-")
    items = list(itertools.takewhile(lambda item: item.at < load_s, Generator(options)))

    async def kill() -> None:
        await asyncio.sleep(kill_after_s)
        await asyncio.to_thread(docker, "kill", testbed.container("worker-1"))

    results: list[Result] = []
    async with RelayClient(testbed.bootstrap) as relay:
        killing = asyncio.create_task(kill())
        summary = await drive(relay, items, timeout=5.0, on_result=results.append)
        await killing
        print(f"{len(items)} requests: outcomes {dict(summary.outcomes)}, errors {dict(summary.errors)}")
        state = docker("inspect", "--format", "{{.State.Running}} {{.State.ExitCode}}", testbed.container("worker-1"))
        assert state.split() == ["false", "137"]
        assert len(items) > load_s
        assert sorted(result.item.event.request_id for result in results) == sorted(
            item.event.request_id for item in items
        )
        assert all((result.outcome is None) != (result.error is None) for result in results)
        assert set(summary.errors) <= {"DeadlineExceeded", "Overloaded"}

        lanes = load_topics(Kafka()).lanes
        in_lane = {lane_of(f"afterwards-{number}", lanes): f"afterwards-{number}" for number in range(50 * lanes)}
        assert len(in_lane) == lanes
        for user in in_lane.values():
            ranking = await relay.rank(replace(items[0].request, user_id=user, request_id=user), timeout=20)
            assert ranking.worker.startswith(testbed.container("worker-2"))  # a container's host name is its id


def test_nothing_is_left_afterwards(testbed: Testbed) -> None:
    testbed.down()
    assert testbed.left("ps", "--all") == []
    assert testbed.left("network", "ls") == []
    assert testbed.left("volume", "ls") == []
