"""The owner of delegated requests: which rankings go to their delegate, and what the delegate learns of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from relaygr_stream.engine.commands import Answer, Command, Measured, Rank
from relaygr_stream.errors import BrokerError
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.history.store import HistoryStore
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.erase import Erase, user_mark
from relaygr_stream.wire.history import HistoryReference
from relaygr_stream.wire.messages import (
    Cancel,
    PreInferSignal,
    RankingRequest,
    ScoreReply,
    Status,
    tenant_key,
    with_version,
)
from relaygr_stream.wire.records import (
    HEADER_CORRELATION,
    HEADER_KIND,
    HEADER_REPLY_PARTITION,
    KIND_CANCEL,
    Record,
    kind_of,
)
from relaygr_stream.wire.refusals import KIND, Refusal, encode_refusals
from tests.statuses import lane_statuses, worker_status
from tests.unit.worker.made import made_requests
from tests.unit.worker.test_outbox_forwards import TOPICS, Producer
from tests.waiting import until

LANE, DELEGATE, ITS_LANE = 5, "w2", 2
TENANT = "shop"
HISTORY = Behaviours.from_arrays([1, 2, 3], [0, 0, 0], [1, 2, 3])
ROUTE = ((HEADER_CORRELATION, b"c"), (HEADER_REPLY_PARTITION, b"1"))
LONG_MS = 60_000.0


class Owner:
    """A worker's requests between a device, of which a test gives the answers, and two producers."""

    def __init__(self, store: HistoryStore | None = None) -> None:
        self.scores, self.others = Producer(), Producer()
        self.device: list[Command] = []
        self.peers = OwnerDirectory(LONG_MS)
        self.state()
        self.offset = 0
        device = SimpleNamespace(
            prefill_bytes=0, submit=lambda *commands: self.device.extend(commands), ask=self.nothing
        )
        model = SimpleNamespace(version="m", tasks=("click",))
        made = made_requests(
            Settings(), TOPICS, (self.scores, self.others), device, model, peers=self.peers, store=store
        )
        self.requests, self.background = made.requests, made.background
        self.requests.on_lanes(frozenset({LANE}), frozenset())

    async def nothing(self, command: Command) -> list[str]:
        """What the device knows of users."""
        return []

    def state(self, **changes: Any) -> None:
        """The delegate's status."""
        self.peers.take(worker_status(DELEGATE, lane_statuses((ITS_LANE,)), **changes))

    def read(self, topic: str, value: bytes, *headers: tuple[str, bytes]) -> None:
        self.offset += 1
        self.requests.on_records([Record(topic, LANE, self.offset, 0, b"u", value, headers)])

    def tell(self, request: str = "r", tenant: str = TENANT) -> None:
        """The trigger's notice: another worker has the request's prefix KV."""
        told = encode_refusals([Refusal(request, "delegated", tenant, DELEGATE)])
        self.read(TOPICS.pre_infer.name, told, (HEADER_KIND, KIND.encode()))

    def rank(self, request: str = "r", tenant: str = TENANT, **fields: Any) -> Rank:
        """A ranking comes. Returns it as the device has it."""
        self.ask(request, tenant, **fields)
        (rank,) = self.device[-1:]
        assert isinstance(rank, Rank)
        return rank

    def ask(self, request: str = "r", tenant: str = TENANT, **fields: Any) -> None:
        """A ranking comes."""
        message = RankingRequest(
            **{
                "request_id": request, "user_id": "u", "prefix": Behaviours.from_arrays([1, 2], [0, 0], [1, 2]),
                "candidates": pack_items([7]), "timeout_ms": LONG_MS, "tenant": tenant, **fields,
            }
        )  # fmt: skip
        self.read(TOPICS.ranking.name, encode(message), *ROUTE)

    def cancel(self, request: str = "r", tenant: str = TENANT) -> None:
        """A client's cancel comes."""
        value = encode(Cancel(request_id=request, tenant=tenant))
        self.read(TOPICS.ranking.name, value, (HEADER_KIND, KIND_CANCEL.encode()))

    async def answer(self, rank: Rank, status: Status = "ok") -> None:
        """The device's; `overloaded` without the prefix KV of a delegated request."""
        measured = Measured(outcome="hbm" if status == "ok" else None)
        self.requests.on_answers([Answer(rank, status, measured=measured)])
        await self.settle()

    async def settle(self) -> None:
        for _ in range(2):  # what a forward that failed has left
            await self.requests.flush(5.0)
        self.background.check()

    def passed_on(self) -> list[str]:
        """Requests that went to the delegate's lane."""
        sent = [(value, more) for _, value, more in self.others.sent if not kind_of(more["headers"])]
        assert all(more["partition"] == ITS_LANE for _, more in sent)
        return [decode(RankingRequest, value).request_id for value, _ in sent]

    def cancelled(self) -> list[str]:
        """Keys of the requests whose cancel went there."""
        sent = [(value, more) for _, value, more in self.others.sent if kind_of(more["headers"]) == KIND_CANCEL]
        assert all(more["partition"] == ITS_LANE for _, more in sent)
        cancels = [decode(Cancel, value) for value, _ in sent]
        return [tenant_key(cancel.tenant, cancel.request_id) for cancel in cancels]

    def admissions(self) -> list[str]:
        return [decode(ScoreReply, value).admission for _, value, _ in self.scores.sent]


async def test_every_ranking_of_a_delegated_request_goes_to_its_delegate() -> None:
    """A second page of candidates, a repeat after a refusal; behind one that is ranked in full, or a hedge."""
    owner = Owner()
    owner.tell()
    for aside in ({"mode": "full"}, {"hops": 1}):
        assert owner.rank(**aside).pass_to is None
    for number in range(1, 3):
        await owner.answer(owner.rank(), "overloaded")
        assert owner.passed_on() == ["r"] * number
    owner.cancel()
    await owner.settle()
    assert owner.cancelled() == [], "a ranking went there, which ends the pin"
    assert owner.rank().pass_to is None


@pytest.mark.parametrize("behind", ["", "read", "answered"])
async def test_a_delegate_releases_what_the_owner_ranked_itself(behind: str) -> None:
    """behind: what the notice came behind; else, the owner has the prefix KV, too."""
    owner = Owner()
    for tenant in ("", TENANT):
        if not behind:
            owner.tell(tenant=tenant)
        task = owner.rank(tenant=tenant)
        assert (task.pass_to is None) == bool(behind)
        if behind == "read":
            owner.tell(tenant=tenant)
        await owner.answer(task)
        if behind == "answered":
            owner.tell(tenant=tenant)
        await owner.settle()
        assert owner.cancelled()[-1:] == [tenant_key(tenant, "r")]
        again = owner.rank(tenant=tenant)
        assert again.pass_to is None
        await owner.answer(again)
    assert owner.cancelled() == ["r", tenant_key(TENANT, "r")], "once each"
    assert owner.passed_on() == []
    assert all(more["key"] == b"" for _, _, more in owner.others.sent), "as a client sends it"


async def test_a_delegate_that_is_too_busy_releases_too_and_one_that_is_gone_is_not_asked() -> None:
    owner = Owner()
    for request, changes in (("busy", {"queue_ms": LONG_MS}), ("gone", {"state": "stopped"})):
        owner.tell(request)
        owner.state(**changes)
        task = owner.rank(request)
        assert task.pass_to is None
        await owner.answer(task)
    assert owner.cancelled() == [tenant_key(TENANT, "busy")]


async def test_no_cancel_goes_where_a_ranking_went_or_may_go() -> None:
    """Else it could stop the prefill that the ranking waits for, or is to find when it is repeated."""
    owner = Owner()
    owner.tell()
    await owner.answer(owner.rank(), "overloaded")
    task = owner.rank()
    assert task.pass_to == ITS_LANE
    for aside in ({"mode": "full"}, {"hops": 1}):
        await owner.answer(owner.rank(**aside))
    assert owner.cancelled() == []
    await owner.answer(task)  # it has them by now
    assert owner.cancelled() == []


@pytest.mark.parametrize("status", ["failed", "deadline_exceeded"])
async def test_a_delegate_releases_what_the_owner_answered_without_scores(status: Status) -> None:
    owner = Owner()
    owner.tell()
    await owner.answer(owner.rank(), status)
    assert owner.cancelled() == [tenant_key(TENANT, "r")]


async def test_a_delegate_releases_what_the_owner_rejected() -> None:
    owner = Owner()
    owner.tell()
    owner.ask(candidates=pack_items(range(Settings().relay.max_candidates + 1)))
    await owner.settle()
    assert [decode(ScoreReply, value).status for _, value, _ in owner.scores.sent] == ["rejected"]
    assert owner.cancelled() == [tenant_key(TENANT, "r")]


async def test_a_refusal_that_went_nowhere_leaves_the_clients_cancel_to_the_delegate() -> None:
    owner = Owner()
    task = owner.rank()
    owner.tell()  # behind the ranking
    await owner.answer(task, "overloaded")
    assert (owner.passed_on(), owner.cancelled()) == ([], [])
    owner.cancel()
    await owner.settle()
    assert owner.cancelled() == [tenant_key(TENANT, "r")]


async def test_a_delegate_that_no_broker_passed_the_ranking_to_releases_it() -> None:
    owner = Owner()
    owner.tell()
    task = owner.rank()
    owner.others.error = BrokerError("no leader")
    await owner.answer(task, "overloaded")
    owner.others.error = None
    (*_, again) = owner.device
    assert isinstance(again, Rank) and again.pass_to is None
    await owner.answer(again)
    assert owner.cancelled() == [tenant_key(TENANT, "r")]


async def test_a_ranking_whose_user_was_erased_while_it_was_passed_on_leaves_nothing_here() -> None:
    owner = Owner()
    owner.tell()
    rank = owner.rank()
    owner.others.error = BrokerError("no leader")
    mark = "0123456789abcdef"
    for user in ("another", "u"):
        await owner.requests.erase(Erase(id=mark, user=user_mark(mark, tenant_key(TENANT, user)), sent_ms=1))
        await owner.answer(rank, "overloaded")
        (*_, again) = owner.device
        assert isinstance(again, Rank)
        assert again.leaves_nothing is (user == "u")
        rank = again._replace(pass_to=ITS_LANE)


async def test_a_delegated_request_whose_client_cancels_it_is_cancelled_there() -> None:
    owner = Owner()
    owner.tell()
    owner.cancel()
    await owner.settle()
    owner.others.error = BrokerError("no leader")
    owner.tell("lost")
    owner.cancel("lost")
    await owner.settle()
    assert owner.cancelled() == [tenant_key(TENANT, "r")]


class Store:
    """A history store that counts its reads."""

    reads = 0

    async def reference(self, user_id: str, tenant: str = "") -> HistoryReference | None:
        return HistoryReference.from_behaviours(HISTORY)

    async def read(self, user_id: str, tenant: str, version: int, start: int, stop: int) -> Behaviours:
        self.reads += 1
        return HISTORY.slice(start, stop)

    async def close(self) -> None: ...


async def test_a_ranking_by_reference_goes_to_its_delegate_without_a_read_of_the_store() -> None:
    store = Store()
    owner = Owner(store)
    fields = {"prefix": Behaviours(), **with_version(HistoryReference.from_behaviours(HISTORY))}
    owner.tell()
    owner.ask(**fields)
    await owner.settle()
    assert (owner.passed_on(), owner.device, store.reads) == (["r"], [], 0)

    owner.others.error = BrokerError("no leader")
    owner.ask(**fields)
    await owner.settle()
    await until(lambda: owner.device, "ranked here after all")
    (rank,) = owner.device
    assert isinstance(rank, Rank)
    assert (rank.pass_to, len(rank.task.tokens), rank.referred) == (None, len(HISTORY), None)
    assert store.reads == 1
    await owner.answer(rank)

    owner.tell("kept")
    kept = owner.rank("kept", **fields)  # whose prefix KV may be here, too
    assert (kept.pass_to, len(kept.task.tokens), store.reads) == (ITS_LANE, len(HISTORY), 1)


async def test_without_a_store_a_ranking_by_reference_goes_to_its_delegate() -> None:
    owner = Owner()
    owner.tell()
    fields = {"prefix": Behaviours(), **with_version(HistoryReference.from_behaviours(HISTORY))}
    owner.ask(**fields)
    await owner.settle()
    assert (owner.passed_on(), owner.device) == (["r"], [])
    owner.others.error = BrokerError("no leader")
    owner.ask(**fields)
    await owner.settle()
    assert [decode(ScoreReply, value).status for _, value, _ in owner.scores.sent] == ["failed"]


async def test_every_answer_tells_what_the_trigger_decided_on_its_tenants_request() -> None:
    owner = Owner()
    refused = encode_refusals([Refusal("r", "over_load"), Refusal("r", "too_late", TENANT)])
    owner.read(TOPICS.pre_infer.name, refused, (HEADER_KIND, KIND.encode()))
    signal = PreInferSignal(
        request_id="r",
        user_id="u",
        prefix=Behaviours.from_arrays([1], [0], [1]),
        admitted_ms=0,
        life_ms=1000.0,
        tenant="signed",
    )
    owner.read(TOPICS.pre_infer.name, encode(signal))
    tenants = {"": "over_load", TENANT: "too_late", "signed": "admitted", "unknown": ""}
    for tenant in (*tenants, *tenants):
        await owner.answer(owner.rank(tenant=tenant))
    assert owner.admissions() == 2 * list(tenants.values())
