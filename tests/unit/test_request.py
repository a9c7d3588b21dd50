"""`relay.request(…)`: announced on entry, ranked with arrays, on real topics."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from msgspec import UNSET

from relaygr_stream import (
    Behaviours,
    DeadlineExceeded,
    HistoryReference,
    HistoryUnavailable,
    RankingRequest,
    Rejected,
    RelayClient,
    RequestEvent,
)
from relaygr_stream.client.answers import Ranking
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import ScoreReply, Timings
from tests.unit.client_peers import client_on, count, responder_on
from tests.waiting import until

HISTORY = (np.array([5, 6, 7]), np.array([1, 0, 1]), np.array([100, 200, 300]))
RECENT = ([8], [1], [400])


async def test_arrays_go_in_and_the_best_items_come_out(kafka_settings: Kafka) -> None:
    async with responder_on(kafka_settings) as peer, client_on(kafka_settings) as relay:
        async with relay.request("u", HISTORY, candidates=3, rank_in=0.25, tenant="shop") as request:
            await until(lambda: len(peer.events) == 1, "announced")
            ranking = await request.rank(np.array([11, 30, 20]), suffix=RECENT, timeout=20)
        event = decode(RequestEvent, peer.events[0].value)
        ((_, asked),) = peer.requests
        assert event.prefix == asked.prefix == Behaviours.from_arrays(*HISTORY)
        assert asked.suffix == Behaviours.from_arrays(*RECENT)
        assert event.request_id == asked.request_id == request.request_id == ranking.request_id
        assert (event.candidates, event.rank_in_ms, event.tenant, asked.tenant) == (3, 250.0, "shop", "shop")
        assert asked.timeout_ms == 20_000.0
        assert ranking.candidates.tolist() == [11, 30, 20]
        assert ranking.top(2, task="click").tolist() == [30, 20]
        assert ranking.top(9, task="like").tolist() == [11, 20, 30]


def test_two_requests_have_two_ids() -> None:
    relay = RelayClient(settings=Settings())
    first, second = (relay.request("u", HISTORY, candidates=3).request_id for _ in range(2))
    assert first != second
    assert relay.request("u", HISTORY, candidates=3, request_id="mine").request_id == "mine"


@pytest.mark.parametrize(
    ("history", "named"),
    [
        (([1, 2], [0], [1, 2]), "history: items, actions and times"),
        (([1, 2], [0, 0], [2, 1]), "history: times must not go back"),
        (([-1], [0], [1]), "history: items must be within"),
        (([1.5], [0], [1]), "history: items must be integers"),
        (([1], [0]), "history: not enough values"),
    ],
)
def test_a_history_that_is_none_is_rejected_by_name(history: tuple[list[int], ...], named: str) -> None:
    with pytest.raises(Rejected, match=named):
        RelayClient(settings=Settings()).request("u", history, candidates=3)  # type: ignore[arg-type]


async def test_bad_candidates_and_suffixes_are_rejected_by_name(kafka_settings: Kafka) -> None:
    async with (
        responder_on(kafka_settings),
        client_on(kafka_settings) as relay,
        relay.request("u", HISTORY, candidates=3) as request,
    ):
        with pytest.raises(Rejected, match="candidates: item ids must be within"):
            await request.rank([-1])
        with pytest.raises(Rejected, match="candidates must be m ≥ 1"):
            await request.rank([])
        with pytest.raises(Rejected, match="suffix: times must not go back"):
            await request.rank([1], suffix=([1, 2], [0, 0], [500, 400]))
        with pytest.raises(Rejected, match="before the prefix ends"):
            await request.rank([1], suffix=([1], [0], [1]))


async def test_an_invalid_request_is_rejected_when_it_is_entered(kafka_settings: Kafka) -> None:
    async with responder_on(kafka_settings), client_on(kafka_settings) as relay:
        with pytest.raises(Rejected, match="user_id"):
            async with relay.request("", HISTORY, candidates=3):
                raise AssertionError("entered")


async def test_an_announcement_that_cannot_leave_does_not_stop_the_ranking(
    kafka_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss costs speed, not scores."""
    from relaygr_stream.client.sender import Announcements
    from relaygr_stream.errors import BrokerUnavailable

    def away(*_: object) -> None:
        raise BrokerUnavailable("no broker takes events")

    async with responder_on(kafka_settings) as peer, client_on(kafka_settings) as relay:
        monkeypatch.setattr(Announcements, "add", away)
        async with relay.request("u", HISTORY, candidates=3) as request:
            assert (await request.rank([1, 2], timeout=20)).top(1, task="click").tolist() == [2]
        assert not peer.events
        assert count(relay, "announcements", outcome="BrokerUnavailable") == 1


async def reach(limit: asyncio.Timeout) -> None:
    limit.reschedule(0.0)
    await asyncio.Event().wait()


async def test_a_request_left_without_scores_is_cancelled_and_no_other(kafka_settings: Kafka) -> None:
    async with responder_on(kafka_settings) as peer, client_on(kafka_settings) as relay:
        async with relay.request("u", HISTORY, candidates=3) as ranked:
            await ranked.rank([1, 2], timeout=20)
        async with relay.request("u", HISTORY, candidates=3, request_id="left", tenant="shop"):
            pass
        with pytest.raises(Rejected):
            async with relay.request("u", HISTORY, candidates=3, request_id="refused") as request:
                await request.rank([])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as limit, relay.request("u", HISTORY, candidates=3, request_id="late"):
                await reach(limit)
        await until(lambda: len(peer.cancels) == 3, "cancelled")
        assert [(cancel.request_id, cancel.tenant) for cancel in peer.cancels] == [
            ("left", "shop"), ("refused", ""), ("late", ""),
        ]  # fmt: skip
        await until(lambda: count(relay, "cancels", outcome="sent") == 3, "acknowledged")


async def test_a_cancel_that_cannot_be_sent_disturbs_nobody(
    kafka_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relaygr_stream.client.sender import Sender
    from relaygr_stream.errors import BrokerUnavailable

    async def away(*_: object, **__: object) -> None:
        raise BrokerUnavailable("no broker takes cancels")

    async with responder_on(kafka_settings) as peer, client_on(kafka_settings) as relay:
        monkeypatch.setattr(Sender, "send", away)
        async with relay.request("u", HISTORY, candidates=3):
            pass
        with pytest.raises(BrokerUnavailable):
            await relay.cancel("u", "r")
        with pytest.raises(Rejected, match="request_id"):
            await relay.cancel("u", "")
        assert not peer.cancels


def nothing(request: RankingRequest) -> list[ScoreReply]:
    return []


async def test_no_answer_is_a_timeout(kafka_settings: Kafka) -> None:
    async with responder_on(kafka_settings, nothing), client_on(kafka_settings) as relay:
        async with relay.request("u", HISTORY, candidates=3) as request:
            with pytest.raises(TimeoutError) as raised:
                await request.rank([1], timeout=0.05)
        assert isinstance(raised.value, DeadlineExceeded)


def ranking(scores: list[list[float]], tasks: tuple[str, ...]) -> Ranking:
    rows = np.array(scores, np.float32)
    items = np.arange(10, 10 + len(rows), dtype=np.uint32)
    return Ranking("r", items, rows, tasks, "hbm", 0.1, Timings(), "w", "m")


def test_one_task_needs_no_name_and_an_unknown_one_is_told_of() -> None:
    assert ranking([[1.0], [3.0], [2.0]], ("click",)).top(2).tolist() == [11, 12]
    two = ranking([[1.0, 2.0]], ("click", "buy"))
    with pytest.raises(ValueError, match="'click', 'buy'"):
        two.top(1)
    with pytest.raises(ValueError, match="task 'watch': the model scores"):
        two.top(1, task="watch")


def test_of_equals_the_earlier_given_comes_first() -> None:
    assert ranking([[1.0], [2.0], [2.0], [1.0]], ("click",)).top(4).tolist() == [11, 12, 10, 13]


class KnownUsers:
    """A history store of a user's own, which is asked for references alone."""

    def __init__(self, known: dict[str, HistoryReference], error: Exception | None = None) -> None:
        self._known = known
        self._error = error

    async def reference(self, user_id: str, tenant: str = "") -> HistoryReference | None:
        if self._error is not None:
            raise self._error
        return self._known.get(f"{tenant}/{user_id}")

    async def read(self, user_id: str, tenant: str, version: int, start: int, stop: int) -> Behaviours:
        raise AssertionError("a client reads no history")

    async def close(self) -> None:
        pass


async def test_a_reference_goes_in_place_of_the_history(kafka_settings: Kafka) -> None:
    reference = HistoryReference.from_behaviours(Behaviours.from_arrays(*HISTORY), 5, [1])
    store = KnownUsers({"shop/u": reference})
    async with responder_on(kafka_settings) as peer, client_on(kafka_settings) as relay:
        for history in (reference, store):
            async with relay.request("u", history, candidates=3, tenant="shop") as request:
                await request.rank([11, 30], suffix=RECENT, timeout=20)
        await until(lambda: len(peer.events) == 2, "announced")
        events = [decode(RequestEvent, record.value) for record in peer.events]
        asked = [message for _, message in peer.requests]
        assert [event.history for event in events] == [request.history for request in asked] == [reference] * 2
        assert not any(len(event.prefix) for event in events) and not any(len(each.prefix) for each in asked)
        async with relay.request("stranger", store, candidates=3) as request:
            await request.rank([11], timeout=20)
        assert peer.requests[-1][1].history is UNSET
        assert peer.requests[-1][1].v == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("no route"), "OSError: no route"),
        (TimeoutError(), "history.timeout_ms"),
        (HistoryUnavailable("x"), "x"),
    ],
)
async def test_a_store_that_does_not_answer_is_a_typed_error(error: Exception, said: str) -> None:
    request = RelayClient(settings=Settings()).request("u", KnownUsers({}, error), candidates=3)
    with pytest.raises(HistoryUnavailable, match=said):
        await request.__aenter__()


async def test_a_request_that_was_not_entered_is_ranked_with_its_history(kafka_settings: Kafka) -> None:
    async with responder_on(kafka_settings) as peer, client_on(kafka_settings) as relay:
        store = KnownUsers({"/u": (reference := HistoryReference.from_behaviours(Behaviours.from_arrays(*HISTORY), 7))})
        await relay.request("u", store, candidates=3).rank([11, 30, 20], timeout=20)
        ((_, asked),) = peer.requests
        assert asked.history == reference


async def test_numbers_of_numpy_are_numbers(kafka_settings: Kafka) -> None:
    async with responder_on(kafka_settings) as peer, client_on(kafka_settings) as relay:
        found = relay.request("u", HISTORY, candidates=np.int64(3), rank_in=np.float32(0.25))  # type: ignore[arg-type]
        async with found as request:
            await request.rank(np.array([11, 30, 20]), timeout=np.float64(20))
        await until(lambda: len(peer.events) == 1, "announced")
        event = decode(RequestEvent, peer.events[0].value)
        assert (event.candidates, event.rank_in_ms, peer.requests[0][1].timeout_ms) == (3, 250.0, 20_000.0)


async def test_a_reference_beyond_the_limit_is_rejected(kafka_settings: Kafka) -> None:
    long = HistoryReference(length=5000, digest=bytes(16))
    async with (
        responder_on(kafka_settings),
        client_on(kafka_settings) as relay,
        relay.request("u", long, candidates=3) as request,
    ):
        with pytest.raises(Rejected, match=r"5000 prefix behaviours, the limit is 4096"):
            await request.rank([1])
