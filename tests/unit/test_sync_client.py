"""The client for threads, on real topics."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from relaygr_stream import BrokerUnavailable, DeadlineExceeded, RequestError, SyncRelayClient
from relaygr_stream.settings.schema import Kafka, Settings
from tests.ports import ports_in_a_row
from tests.unit.client_peers import responder_on
from tests.unit.test_request import HISTORY, RECENT
from tests.waiting import WITHIN_S, until, until_blocking

THREADS = 8


def ranked(relay: SyncRelayClient, number: int) -> list[int]:
    with relay.request(f"u{number}", HISTORY, candidates=3) as request:
        ranking = request.rank([number, 30, 20], suffix=RECENT, timeout=20)
    assert ranking.request_id == request.request_id
    return list(ranking.candidates)


async def test_many_threads_rank_at_once_and_each_gets_its_own(kafka_settings: Kafka) -> None:
    def service() -> list[list[int]]:
        with SyncRelayClient(settings=Settings(kafka=kafka_settings)) as relay, ThreadPoolExecutor(THREADS) as threads:
            return list(threads.map(lambda number: ranked(relay, number), range(40)))

    async with responder_on(kafka_settings) as peer:
        assert await asyncio.to_thread(service) == [[number, 30, 20] for number in range(40)]
        await until(lambda: len(peer.events) == 40, "all announced")
        assert not peer.cancels
    assert not [each for each in threading.enumerate() if each.name == "relaygr-client"]


async def test_errors_are_the_same_and_leaving_without_scores_cancels(kafka_settings: Kafka) -> None:
    def service() -> None:
        with SyncRelayClient(settings=Settings(kafka=kafka_settings)) as relay:
            with pytest.raises(DeadlineExceeded), relay.request("u", HISTORY, candidates=3) as request:
                request.rank([1], timeout=0.3)
            with pytest.raises(ValueError, match="mine"), relay.request("v", HISTORY, candidates=3):
                raise ValueError("mine")

    async with responder_on(kafka_settings) as peer:
        peer.hold = True
        await asyncio.to_thread(service)
        await until(lambda: len({cancel.request_id for cancel in peer.cancels}) == 2, "both cancelled")


async def test_closing_ends_the_calls_of_other_threads(kafka_settings: Kafka) -> None:
    def service() -> None:
        with ThreadPoolExecutor(1) as other:
            with SyncRelayClient(settings=Settings(kafka=kafka_settings)) as relay:
                call = other.submit(ranked, relay, 1)
                until_blocking(lambda: relay.client.in_flight == 1, "asked")
            with pytest.raises(RequestError):
                call.result(WITHIN_S)

    async with responder_on(kafka_settings) as peer:
        peer.hold = True
        await asyncio.to_thread(service)


def test_a_client_that_is_not_open_says_how_to_open_it() -> None:
    relay = SyncRelayClient(settings=Settings())
    with pytest.raises(RequestError, match="with SyncRelayClient"), relay.request("u", HISTORY, candidates=3):
        pass


def test_a_broker_that_is_away_is_told_on_entering() -> None:
    port = ports_in_a_row(1)
    with (
        pytest.raises(BrokerUnavailable),
        SyncRelayClient(settings=Settings(kafka=Kafka(bootstrap=f"127.0.0.1:{port}", request_timeout_ms=1000))),
    ):
        pass
    assert not [each for each in threading.enumerate() if each.name == "relaygr-client"]
