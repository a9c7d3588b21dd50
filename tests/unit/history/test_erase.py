"""A user is removed everywhere, and nobody else is: the store, a real worker's memory, the dead letters."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Counter

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.away import Away
from relaygr_stream.bus.erasures import Erasures
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.routes import write_routes
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import topic_exists
from relaygr_stream.cli.main import main
from relaygr_stream.engine.commands import EraseUser
from relaygr_stream.errors import DecodeError
from relaygr_stream.history.sqlite_store import SqliteStore
from relaygr_stream.ops.dead_letters.replay import read_letters
from relaygr_stream.ops.erase import erase_from_fleet, names_user
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.settings.worker import Handover
from relaygr_stream.telemetry.background import Background
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.erase import (
    CLOCK_MS,
    HOUR_MS,
    KEPT_MS,
    KEY_PREFIX,
    KEYED_VERSION,
    KIND,
    Erase,
    ErasedUsers,
    encode_erase,
    filter_named_users,
    read_erase,
    user_mark,
)
from relaygr_stream.wire.messages import RequestEvent, tenant_key
from relaygr_stream.wire.records import (
    HEADER_KIND,
    HEADER_ORIGIN_TOPIC,
    HEADER_REASON,
    HEADER_REPLAY_OF,
    Record,
    kind_of,
)
from relaygr_stream.wire.routes import Routes, group_settings, routes_topic
from relaygr_stream.wire.signature import Signer
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader
from relaygr_stream.worker.requests import Requests
from tests.statuses import worker_status
from tests.unit.cache.worlds import table_of
from tests.unit.worker.services import Peer, history, worker_on
from tests.unit.worker.test_service_histories import rank, settings_with, signal, sqlite
from tests.waiting import until

SECRET = "a secret of sixteen characters"


@pytest.mark.stack
async def test_every_worker_drops_the_user_and_says_so(embedded_settings: Kafka, tmp_path: Path) -> None:
    settings = settings_with(embedded_settings, sqlite(tmp_path))
    settings = msgspec.structs.replace(settings, handover=Handover(secret=SECRET))
    store = SqliteStore(tmp_path / "histories", 20.0)
    async with Peer(embedded_settings) as peer, worker_on(settings) as w:
        users = ("ann", "bob")
        references = {user: await store.replace(user, "", history(user, 60)) for user in users}
        for user in users:
            await signal(peer, f"r-{user}", user, references[user])
            assert (await peer.reply(await rank(peer, f"r-{user}", user, references[user]))).status == "ok"
        await peer.reply(await peer.rank("mine", "ann", 50, tenant="shop"))
        cache, histories = w.runtime.scheduler.cache, w.worker.requests.resolver.histories
        assert histories is not None
        assert cache.entries == 3
        assert await store.erase("ann")
        done = await erase_from_fleet(settings, "ann", "", 20.0)
        assert (done.confirmed, done.unconfirmed, done.complete) == (["w1"], [], True)
        assert sorted(table_of(cache).users()) == ["bob", tenant_key("shop", "ann")]
        assert histories.known("ann", "", references["ann"]) is None
        assert histories.known("bob", "", references["bob"]) is not None
        failed = await peer.reply(await rank(peer, "again", "ann", references["ann"]))
        assert failed.status == "failed"
        # Whoever has not the secret erases nobody.
        mallory = msgspec.structs.replace(settings, handover=Handover())
        refused = await erase_from_fleet(mallory, "bob", "", 1.0)
        assert refused.unconfirmed == ["w1"]
        await until(lambda: w.total("statuses_unsigned") > 0)
        assert "bob" in table_of(cache).users()
        await w.end()  # it checks the books
    await store.close()


@pytest.mark.stack
async def test_a_ranking_on_its_way_is_answered_and_leaves_nothing(
    embedded_settings: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, erase = asyncio.Event(), Requests.erase

    async def noted(requests: Requests, request: Erase) -> None:
        asked.set()
        await erase(requests, request)

    monkeypatch.setattr(Requests, "erase", noted)
    settings = settings_with(embedded_settings, sqlite(tmp_path))
    async with Peer(embedded_settings) as peer, worker_on(settings) as w:
        w.model.hang = True
        ranking = await peer.rank("r", "ann", 60)
        await until(lambda: len(w.runtime.scheduler.rankings))
        erasing = asyncio.create_task(erase_from_fleet(settings, "ann", "", 20.0))
        await until(asked.is_set, "the worker asked to erase")
        w.model.hang = False
        assert (await erasing).confirmed == ["w1"]
        assert (await peer.reply(ranking)).status == "ok"
        await until(lambda: w.runtime.scheduler.cache.entries == 0)
        await w.end()  # it checks the books


@pytest.mark.stack
async def test_a_tiers_file_says_what_was_carried_out_not_what_was_read(
    embedded_settings: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go_on, erase = asyncio.Event(), asyncio.Event(), Requests.erase

    async def late(requests: Requests, request: Erase) -> None:
        asked.set()
        await go_on.wait()
        await erase(requests, request)

    monkeypatch.setattr(Requests, "erase", late)
    settings = settings_with(embedded_settings, sqlite(tmp_path))
    worker = msgspec.structs.replace(settings.worker, dram_path=str(tmp_path))
    settings = msgspec.structs.replace(settings, worker=worker)
    async with Peer(embedded_settings) as peer, worker_on(settings) as w:
        file = w.runtime.tier_file
        assert file is not None
        await until(lambda: file.until)
        erasing = asyncio.create_task(erase_from_fleet(settings, "ann", "", 60.0))
        await until(asked.is_set, "the worker asked to erase")
        before, stated = file.until, len(peer.statuses)
        await until(lambda: len(peer.statuses) > stated + 3)
        assert file.until == before
        go_on.set()
        assert (await erasing).confirmed == ["w1"]
        await until(lambda: file.until != before)


def letter(user: str, *, tenant: str = "", value: bool = False) -> dict[str, Any]:
    message = RequestEvent(request_id="r", user_id=user, prefix=Behaviours(), candidates=1, tenant=tenant)
    headers = [(HEADER_REASON, b"invalid"), (HEADER_ORIGIN_TOPIC, b"x.retrieval")]
    return {"value": encode(message) if value else b"", "key": user.encode(), "headers": headers}


async def test_dead_letters_of_the_user_go_and_those_of_others_stay(
    request: pytest.FixtureRequest, kafka_settings: Kafka
) -> None:
    settings = Settings(kafka=kafka_settings)
    async with Peer(kafka_settings) as peer:
        topic = peer.topics.dead_letter.name
        written = [
            letter("bob"),
            letter("ann", value=True),
            letter("cid", value=True),
            {"value": b"", "key": b"bob", "headers": [(HEADER_REPLAY_OF, b"0:0")]},
            letter("ann", tenant="shop", value=True),
            letter("ann"),
            letter("dan"),
            {"value": b"", "key": b"cid", "headers": [(HEADER_REPLAY_OF, b"0:2")]},  # behind the user's last one
        ]
        for each in written:
            await peer.producer.send_and_wait(topic, **each)
        before = await read_letters(kafka_settings, Away())
        assert [each.key for each in before if each.replayed] == [b"bob", b"cid"]
        done = await erase_from_fleet(settings, "ann", "", 0.0)
        if "embedded" in request.node.name:  # it deletes no records, and nothing has changed
            assert "does not delete records" in done.letters_left
            assert not done.complete
            assert len(await read_letters(kafka_settings, Away())) == len(before)
            return
        assert (done.letters, done.letters_left) == (2, "")
        left = await read_letters(kafka_settings, Away())
        assert sorted(each.key or b"" for each in left) == [b"ann", b"bob", b"cid", b"dan"]
        assert {each.key for each in left if each.replayed} == {b"bob", b"cid"}
        assert {each.key: each.value for each in left}[b"cid"] == written[2]["value"]
        assert (await erase_from_fleet(settings, "nobody", "", 0.0)).letters == 0


@pytest.mark.parametrize(
    ("written", "user", "named"),
    [
        (letter("ann"), ("ann", ""), True),
        (letter("ann"), ("ann", "shop"), True),
        (letter("ann", value=True), ("ann", "shop"), False),
        (letter("ann", tenant="shop", value=True), ("ann", "shop"), True),
        (letter("bob"), ("ann", ""), False),
        ({"value": b"\xc1", "key": b"ann", "headers": [(HEADER_REASON, b"malformed")]}, ("ann", ""), True),
        ({"value": b"\x92\x01\x02", "key": None, "headers": [(HEADER_REASON, b"malformed")]}, ("ann", ""), False),
    ],
)
def test_who_a_dead_letter_names(written: dict[str, Any], user: tuple[str, str], named: bool) -> None:
    record = Record("d", 0, 0, 0, written["key"], written["value"], tuple(written["headers"]))
    assert names_user(record, *user) is named


def test_the_device_thread_compares_only_who_came_since_all_were_compared() -> None:
    erase = Erase(id="0" * 16, user=user_mark("0" * 16, "ann"), sent_ms=1)
    everybody = ["ann", "bob"]
    assert EraseUser(erase).among(everybody) == ["ann"]
    assert EraseUser(erase, {"ann"}, {"ann", "bob"}).among(everybody) == ["ann"]
    assert EraseUser(erase, known={"bob"}).among(everybody) == ["ann"]  # she came later
    assert EraseUser(erase, known={"ann", "bob"}).among(everybody) == []  # nobody is compared twice


def test_a_request_to_erase_is_signed_fresh_and_names_nobody_in_clear() -> None:
    signer = Signer(SECRET)
    reader = StatusReader(signer=signer)
    asked = Erase.request("0" * 32, "ann", now_ms(), reader)

    def record(erase: Erase, signed: bool = True) -> Record:
        key, value, headers = (KEY_PREFIX + erase.id).encode(), encode_erase(erase), [(HEADER_KIND, KIND.encode())]
        headers = signer.sign("t", key, value, headers) if signed else headers
        return Record("t", 0, 0, 0, key, value, tuple(headers))

    read = read_erase(record(asked), reader)
    assert read is not None
    assert read.names("ann")
    assert not read.names("bob")
    assert b"ann" not in encode_erase(asked)
    assert user_mark(asked.id, "ann") != asked.user, "whoever reads the record could try user ids"
    earlier = read_erase(record(Erase(id="1" * 32, user=user_mark("1" * 32, "ann"), sent_ms=now_ms())), reader)
    assert earlier is not None and earlier.names("ann") and not earlier.names("bob"), "an earlier command asks so"
    late = record(msgspec.structs.replace(asked, sent_ms=now_ms() - KEPT_MS // 2))
    assert read_erase(late, reader) is not None, "its brokers were away"
    early, stale = (msgspec.structs.replace(asked, sent_ms=now_ms() + off_ms) for off_ms in (120_000, -2 * KEPT_MS))
    for forged, why in (
        (record(asked, signed=False), "no signature"),
        (record(early), "1[12][0-9] s after now, .* up to 60 s after"),
        (record(stale), "240[0-9] s before now, .* up to 1200 s before"),
    ):
        with pytest.raises(DecodeError, match=f"unsigned: .*{why}"):
            read_erase(forged, reader)


def keyed(secret: str, user: str = "ann") -> Record:
    """A request by a command that has this secret."""
    reader = StatusReader(signer=Signer(secret))
    assert reader.signer is not None
    erase = Erase.request("0" * 32, user, now_ms(), reader)
    key, value, headers = (KEY_PREFIX + erase.id).encode(), encode_erase(erase), [(HEADER_KIND, KIND.encode())]
    return Record("t", 0, 0, 0, key, value, tuple(reader.signer.sign("t", key, value, headers)))


def test_while_the_secret_is_changed_both_name_the_user() -> None:
    other = "another secret of the fleet"
    for signer in (Signer(SECRET, other), Signer(other, SECRET)):
        for secret in (SECRET, other):
            read = read_erase(keyed(secret), StatusReader(signer=signer))
            assert read is not None and read.names("ann") and not read.names("bob")


SECRETS = {"": None, **{secret: Signer(secret) for secret in (SECRET, "another secret of the fleet")}}
ASKED = st.tuples(st.sampled_from("abcd"), st.integers(0, 3 * HOUR_MS), st.sampled_from([*SECRETS]), st.booleans())


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(0, 3 * HOUR_MS), st.sampled_from([*SECRETS]), st.booleans())
    )
)
def test_many_requests_together_name_whom_each_names_alone(asked: list[tuple[str, int, str, bool]]) -> None:
    """old: as the last release sends them."""
    believed = Signer(*(secret for secret in SECRETS if secret))
    erases = list[Erase]()
    for number, (user, sent_ms, secret, old) in enumerate(asked):
        sender = StatusReader(signer=SECRETS[secret])
        erase = Erase.request(f"{number:016}", user, sent_ms, sender)
        if old:
            erase = msgspec.structs.replace(erase, hour_mark=b"")
        key, value, headers = (KEY_PREFIX + erase.id).encode(), encode_erase(erase), [(HEADER_KIND, KIND.encode())]
        if sender.signer is not None:
            headers = sender.signer.sign("t", key, value, headers)
        reader = StatusReader(signer=believed if secret else None)
        read = read_erase(Record("t", 0, 0, 0, key, value, tuple(headers)), reader, fresh=False)
        assert read is not None
        assert read.names(user)
        erases.append(read)
    erased = ErasedUsers(erases)
    for user in "abcdef":
        assert (user in erased) == any(erase.names(user) for erase in erases)
        assert (user in erased) == (user in {each for each, *_ in asked})


def test_a_user_is_looked_up_with_one_hash_for_an_hours_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    erased = ErasedUsers(Erase.request(f"{number:016}", f"u{number}", number, StatusReader()) for number in range(100))
    hashed = list[str]()

    def counted(salt: str, user_key: str, key: bytes = b"") -> bytes:
        hashed.append(user_key)
        return user_mark(salt, user_key, key)

    monkeypatch.setattr("relaygr_stream.wire.erase.user_mark", counted)
    assert "u99" in erased
    assert "u100" not in erased
    assert hashed == ["u99", "u100"]


def test_a_request_with_a_part_of_its_hours_mark_names_its_user_all_the_same() -> None:
    request = Erase.request("1" * 16, "u", 0, StatusReader())
    assert "u" in ErasedUsers([msgspec.structs.replace(request, hour_mark=request.hour_mark[:8])])


class Drops:
    """An Eraser: the users whom each request drops, of three."""

    def __init__(self) -> None:
        self.dropped: list[set[str]] = []

    async def erase(self, erase: Erase) -> None:
        self.dropped.append(await filter_named_users(["ann", "bob", "eve"], erase))

    async def on_erased(self, ids: tuple[str, ...]) -> None:
        """Nobody is told."""


async def test_who_was_without_a_broker_for_longer_than_requests_are_believed_drops_every_user() -> None:
    drops, background, now = Drops(), Background(), [50.0]
    refused = Counter("refused", "of the test", registry=None)
    reader = StatusReader(signer=Signer(SECRET))
    erasures = Erasures(reader, background, drops, refused, clock=lambda: now[0])
    try:
        for away_s in (1.0, KEPT_MS / 1e3 - CLOCK_MS / 1e3, 1.0):
            now[0] += away_s
            erasures.on_records([keyed(SECRET)])
        await until(lambda: not erasures.under_way)
        assert drops.dropped == [{"ann"}] * 3, "each was there to be read"
        now[0] += KEPT_MS / 1e3
        erasures.on_records([])
        assert erasures.under_way
        await until(lambda: not erasures.under_way)
        assert drops.dropped[3:] == [{"ann", "bob", "eve"}]
        now[0] += 1.0
        erasures.on_records([])
        assert not erasures.under_way, "once"
    finally:
        await background.end()


def test_who_cannot_know_the_user_refuses_instead_of_confirming(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without the secret, and a release that would compare another hash."""
    with pytest.raises(DecodeError, match="has not"):
        read_erase(keyed(SECRET), StatusReader())
    monkeypatch.setattr("relaygr_stream.wire.versions.READ_VERSION", KEYED_VERSION - 1)
    with pytest.raises(DecodeError, match="unknown_version"):
        read_erase(keyed(SECRET), StatusReader(signer=Signer(SECRET)))


@pytest.mark.stack
async def test_a_worker_that_has_confirmed_has_confirmed_whatever_it_states_later(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status lists its last 16 erasures, and there may be more at once."""
    monkeypatch.setattr(
        "relaygr_stream.ops.erase.LISTEN_S", 8.0
    )  # w1 states nothing until this process has read the request
    settings = Settings(kafka=embedded_settings)
    async with Peer(embedded_settings) as peer, AsyncExitStack() as stack:
        topic = peer.topics.worker_status.name
        asked: list[Record] = []

        def on_records(records: list[Record]) -> None:
            asked.extend(record for record in records if kind_of(record.headers) == KIND and record.value)

        await stack.enter_async_context(TopicTail(embedded_settings, topic, [0], "latest", on_records))
        erasing = asyncio.create_task(erase_from_fleet(settings, "ann", "", 20.0))
        await until(lambda: asked)
        erase = read_erase(asked[0], StatusReader())
        assert erase is not None
        for erased in ((erase.id,), ("another " * 2,)):
            status = worker_status("w1", sent_ms=now_ms(), erased=erased)
            await peer.producer.send_and_wait(topic, encode(status), key=b"w1")
        assert (await erasing).confirmed == ["w1"]


async def test_a_fleet_whose_statuses_are_not_believed_has_confirmed_nothing(embedded_settings: Kafka) -> None:
    """It refuses the request, too, where the command has another secret than the workers."""
    async with Peer(embedded_settings) as peer:
        erasing = asyncio.create_task(erase_from_fleet(signed_with(embedded_settings, SECRET), "ann", "", 0.0))
        topic = peer.topics.worker_status.name
        while not erasing.done():
            await peer.producer.send_and_wait(topic, encode(worker_status("w1", sent_ms=now_ms())), key=b"w1")
            await asyncio.sleep(0.1)
        done = erasing.result()
        assert (done.confirmed, done.unconfirmed, done.complete) == ([], [], False)
        assert done.unread


def signed_with(kafka: Kafka, secret: str) -> Settings:
    return Settings(kafka=kafka, handover=Handover(secret=secret))


async def test_a_run_that_ended_half_way_is_taken_up(kafka_settings: Kafka, request: pytest.FixtureRequest) -> None:
    if "embedded" in request.node.name:
        pytest.skip("needs a broker that deletes records: set KAFKA_HOME")
    async with Peer(kafka_settings) as peer:
        topic = peer.topics.dead_letter.name
        for each in (letter("bob"), letter("ann"), letter("bob")):  # the last is the copy of the first
            await peer.producer.send_and_wait(topic, **each)
        assert (await erase_from_fleet(Settings(kafka=kafka_settings), "ann", "", 0.0)).letters == 1
        assert [each.key for each in await read_letters(kafka_settings, Away())] == [b"bob"]


@pytest.mark.parametrize("bad", ["é" * 40, "a" * 15, "a" * 65, "a" * 16 + "\n", "a" * 15 + " "])
def test_a_request_to_erase_has_an_id_that_can_be_a_key(bad: str) -> None:
    """It is hashed with in every worker: what the hash takes for no key would end them all."""
    value = encode_erase(Erase(id=bad, user=bytes(16), sent_ms=now_ms()))
    with pytest.raises(DecodeError, match="malformed"):
        read_erase(Record("t", 0, 0, 0, b"erase/x", value, ((HEADER_KIND, KIND.encode()),)), StatusReader())


async def test_the_command_says_what_it_did_and_what_the_logs_hold(embedded_settings: Kafka, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "histories", 20.0)
    await store.replace("ann", "", history("ann", 60))
    async with Peer(embedded_settings):
        flags = {"history.store": sqlite(tmp_path), "kafka.prefix": embedded_settings.prefix, "kafka.partitions": "8"}
        given = [f"--set={name}={value}" for name, value in flags.items()]
        arguments = ["history", "erase", "ann", "--wait", "0", *given, "--bootstrap", embedded_settings.bootstrap]
        done = await asyncio.to_thread(CliRunner().invoke, main, arguments)
        assert done.exit_code == 0, done.output
        assert "history store: erased" in done.output
        assert "workers: 0 have dropped the user" in done.output
        assert "triggers: 0 have dropped the user" in done.output
        assert "ranking: up to" in done.output
    assert await store.reference("ann") is None
    await store.close()


@pytest.mark.stack
async def test_workers_of_every_group_drop_the_user(embedded_settings: Kafka, tmp_path: Path) -> None:
    """Those of a group without users, too: a user may have moved away from it."""
    own = settings_with(embedded_settings, sqlite(tmp_path))
    lanes = load_topics(own.kafka).lanes
    other = group_settings(own, "next", lanes)
    async with Peer(own.kafka) as here, Peer(other.kafka) as there, worker_on(own) as w, worker_on(other) as v:
        for peer in (here, there):
            await peer.reply(await peer.rank("r", "ann", 50))
        topics = load_topics(own.kafka)
        await topic_exists(own.kafka, routes_topic(topics), create=True)
        async with Producer(own.kafka, client_id="routes") as producer:
            routes = Routes.of_one("", lanes).moved("next", lanes, 0)
            await write_routes(producer, topics, StatusReader(), routes)
        done = await erase_from_fleet(own, "ann", "", 20.0)
        assert (done.confirmed, done.unconfirmed, done.complete) == (["w1", "w1"], [], True)
        assert [group.kafka.prefix for group in done.groups] == [other.kafka.prefix, own.kafka.prefix]
        for worker in (w, v):
            assert "ann" not in table_of(worker.runtime.scheduler.cache).users()
