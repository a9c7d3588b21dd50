"""Clients that are slow, huge, broken, many or strangers: each is refused or closed, and the next request is served."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path

import pytest
import trustme
import uvloop
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from relaygr_stream.errors import ConfigError
from relaygr_stream.gateway import connection, connections
from relaygr_stream.gateway.tokens import TenantTokens
from relaygr_stream.settings.schema import Gateway, Kafka
from tests.unit.client_peers import responder_on
from tests.unit.gateway.doors import OTHER, RANK, TOKEN, OpenDoor, Reply, door_on
from tests.waiting import WITHIN_S, until

#: gateway.read_ms of tests that wait for its end. On a crowded machine, too, an honest request takes less.
READ_MS = 4000.0
HEAD = f"POST /v1/rank HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n".encode()
#: Of requests whose body is read: their connections would serve on.
CLOSING = HEAD + b"connection: close\r\n"


@asynccontextmanager
async def raw(door: OpenDoor) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer_to(door: OpenDoor, data: bytes) -> bytes:
    """What a client that sends this gets until the gateway closes."""
    async with raw(door) as (reader, writer):
        writer.write(data)
        async with asyncio.timeout(WITHIN_S):
            return await reader.read()


async def still_serves(door: OpenDoor) -> bool:
    return (await door.ask("POST", "/v1/rank", RANK, relaygr_timeout_ms="20000")).status == 200


#: What is sent, and the status of the answer behind which the connection is closed.
REFUSED = {
    "tls": (b"\x16\x03\x01 not http\r\n\r\n", b"400"),
    "negative": (b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n", b"400"),
    "path": (b"GET http://x HTTP/1.1\r\nhost: x\r\n\r\n", b"400"),
    # Arrives in one read: a connection that is closed with unread bytes is reset, and its answer may be lost.
    "head": (b"GET / HTTP/1.1\r\nx: " + b"y" * 30_000, b"431"),
    "huge": (HEAD + b"content-length: 99999999\r\n\r\n", b"413"),
    "digits": (HEAD + b"content-length: 1" + b"0" * 400 + b"\r\n\r\n", b"400"),
    "chunked": (CLOSING + b"transfer-encoding: chunked\r\n\r\n8000\r\n" + b" " * 0x8000 + b"\r\n0\r\n\r\n", b"413"),
    "slow": (HEAD + b"content-length: 50\r\n\r\nhalf", b"408"),
    "gzip": (CLOSING + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}", b"415"),
    "text": (CLOSING + b"content-type: text/plain\r\ncontent-length: 2\r\n\r\n{}", b"415"),
    "token": (b"POST /v1/rank HTTP/1.1\r\nhost: x\r\nauthorization: Bearer \xff\xfe\r\n\r\n", b"401"),
}


async def test_what_cannot_be_served_is_refused_and_closed(embedded_settings: Kafka, subtests: pytest.Subtests) -> None:
    async with (
        responder_on(embedded_settings),
        door_on(embedded_settings, max_body_bytes=20_000, read_ms=READ_MS) as door,
    ):
        for name, (data, status) in REFUSED.items():
            with subtests.test(name):
                answer = await answer_to(door, data)
                assert answer.split(b" ", 2)[1] == status, answer[:200]
                assert await still_serves(door)


MALFORMED = {
    "empty": b"",
    "cut": b"[",
    "c1": b"\xc1",
    "deep": b"[" * 200_000,
    "utf8": b'{"user_id":"' + b"\xff" * 9 + b'"}',
    "inf": b'{"user_id":1e999}',
    "null": b"null",
}


async def test_bodies_that_are_none_are_malformed(embedded_settings: Kafka, subtests: pytest.Subtests) -> None:
    async with responder_on(embedded_settings), door_on(embedded_settings) as door:
        for (name, body), media, path in product(
            MALFORMED.items(), ("application/json", "application/msgpack"), ("/v1/announce", "/v1/rank")
        ):
            with subtests.test(f"{name} {media} {path}"):
                found = await door.ask("POST", path, body, content_type=media)
                assert (found.status, found.value["error"]) == (400, "malformed")
        assert await still_serves(door)


async def test_slow_heads_are_closed(embedded_settings: Kafka) -> None:
    async with responder_on(embedded_settings), door_on(embedded_settings, read_ms=READ_MS) as door:
        async with raw(door) as (reader, writer), raw(door) as (silent, _):
            writer.write(b"POST /v1/ra")
            async with asyncio.timeout(WITHIN_S):
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await silent.readexactly(1)
        assert await still_serves(door)


async def test_what_is_left_of_an_answer_is_not_waited_for(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that takes up nothing holds a connection for read_ms, and no memory beyond an answer.

    Less than a transport's high-water mark of 64 KiB held it until the client closed it.
    """
    opened: list[asyncio.Transport] = []
    made = connection.HttpConnection.connection_made

    def noted(connection: connection.HttpConnection, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        opened.append(transport)
        made(connection, transport)

    monkeypatch.setattr(connection.HttpConnection, "connection_made", noted)
    async with responder_on(embedded_settings), door_on(embedded_settings, read_ms=READ_MS) as door:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", door.port))
            await loop.sock_sendall(client, b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n")
            await until(lambda: opened and opened[0].get_write_buffer_size(), "it does not fit the sockets")
            assert opened[0].get_write_buffer_size() < 64 << 10
            await until(lambda: door.count("connections") == 0, "closed")
        assert await still_serves(door)


async def test_trailers_are_bounded_and_dropped(embedded_settings: Kafka, subtests: pytest.Subtests) -> None:
    """They grew the list of a request's headers without bound, and without a token."""
    head = b"GET /healthz HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
    async with responder_on(embedded_settings), door_on(embedded_settings, read_ms=60_000.0) as door:
        for name, trailers in (("many", b"ab:cd\r\n" * 100_000), ("long", b"ab:" + b"x" * 700_000)):
            with subtests.test(name):
                async with raw(door) as (reader, writer), asyncio.timeout(WITHIN_S):
                    writer.write(head)
                    assert (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1] == b"200"
                    writer.write(trailers)
                    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                        await reader.readexactly(1 << 20)
        async with raw(door) as (reader, writer), asyncio.timeout(WITHIN_S):
            writer.write(head + b"ab: cd\r\n\r\n")
            assert (await reader.readuntil(b"}")).count(b"HTTP/1.1 200") == 1
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert (await reader.read()).count(b"HTTP/1.1 200") == 1
        assert await still_serves(door)


CANCEL = f"DELETE /v1/requests/r?user_id=u HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n".encode()


@pytest.mark.parametrize("rest", [4, 50])
async def test_a_body_that_nobody_reads_is_not_waited_for(embedded_settings: Kafka, rest: int) -> None:
    """uvicorn ends its timer at further data, and begins none for the rest of the body of an answered request."""
    async with (
        responder_on(embedded_settings),
        door_on(embedded_settings, read_ms=READ_MS) as door,
        raw(door) as (reader, writer),
        asyncio.timeout(WITHIN_S),
    ):
        writer.write(CANCEL + b"content-length: 50\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1] == b"204"
        writer.write(b"x" * rest)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)


async def test_a_tenant_has_so_many_connections_and_leaves_room_for_others(embedded_settings: Kafka) -> None:
    async def cancelled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(CANCEL + b"\r\n")
        return (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1]

    async with (
        responder_on(embedded_settings),
        door_on(embedded_settings, max_requests=1, read_ms=60_000.0) as door,
        raw(door) as first,
        asyncio.timeout(WITHIN_S),
    ):
        async with raw(door) as second:
            for each in (first, second, first):
                assert await cancelled(*each) == b"204"
            refused = await door.ask("POST", "/v1/rank", RANK)
            assert (refused.status, refused.value["error"]) == (429, "overloaded")
            assert "connections of this tenant" in refused.value["detail"]
            assert (await door.ask("POST", "/v1/rank", RANK, token_=OTHER)).status == 200
        await until(lambda: door.count("connections") == 1, "the second has ended")
        assert await still_serves(door)


async def test_strangers_do_not_keep_clients_out(embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_STRANGERS", 4)
    monkeypatch.setattr(connections, "GRACE_S", 0.05)
    async with responder_on(embedded_settings), door_on(embedded_settings, read_ms=60_000.0) as door:
        opened = [await asyncio.open_connection("127.0.0.1", door.port) for _ in range(12)]
        try:
            assert await still_serves(door)
        finally:
            for _, writer in opened:
                writer.close()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_strangers_by_tls_give_way_as_others_do(
    loop: Callable[[], asyncio.AbstractEventLoop],
    embedded_settings: Kafka,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "MAX_STRANGERS", 4)
    authority, file, trust = trustme.CA(), tmp_path / "gateway.pem", ssl.create_default_context()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(file))
    authority.configure_trust(trust)

    async def held() -> None:
        async with (
            responder_on(embedded_settings),
            door_on(embedded_settings, read_ms=600_000.0, tls_certificate=str(file)) as door,
        ):
            opened = []
            for _ in range(6):
                reader, writer = await asyncio.open_connection("127.0.0.1", door.port, ssl=trust)
                opened.append((reader, writer))
                writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
                await reader.readuntil(b'{"status":"ok"}')  # served, and open for the next request
            await until(lambda: sum(reader.at_eof() for reader, _ in opened) == 5, "one of an address is left")
            for _, writer in opened:
                writer.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(held())


async def test_one_tenant_cannot_take_the_places_of_another(embedded_settings: Kafka) -> None:
    async with responder_on(embedded_settings) as peer, door_on(embedded_settings, max_requests=2) as door:
        peer.hold = True

        def ask(token: str) -> asyncio.Task[Reply]:
            return asyncio.create_task(door.ask("POST", "/v1/rank", RANK, token_=token))

        waiting = [ask(TOKEN), ask(TOKEN)]
        await until(lambda: len(peer.held) == 2, "both wait")
        refused = await door.ask("POST", "/v1/rank", RANK)
        assert (refused.status, refused.value["error"]) == (429, "overloaded")
        assert "gateway.max_requests" in refused.value["detail"]
        waiting.append(ask(OTHER))
        await until(lambda: len(peer.held) == 3, "the other tenant's is on its way")
        assert {request.client_id for _, request in peer.held} == {"shop", "library"}
        peer.release()
        assert {answer.status for answer in await asyncio.gather(*waiting)} == {200}
        assert door.count("in_flight") == 0


async def test_a_client_that_leaves_gives_its_place_back(embedded_settings: Kafka) -> None:
    async with responder_on(embedded_settings), door_on(embedded_settings, max_requests=1) as door:
        async with raw(door) as (_, writer):
            writer.write(HEAD + b"content-length: 50\r\n\r\nhalf")
            await until(lambda: door.count("in_flight") == 1, "it asks")
        await until(lambda: door.count("in_flight") == 0, "it left")
        assert await still_serves(door)


def whole(body: bytes) -> bytes:
    return HEAD + f"content-length: {len(body)}\r\n\r\n".encode() + body


async def test_a_caller_that_leaves_takes_its_ranking_along(embedded_settings: Kafka) -> None:
    """Callers that gave up held their places until the rankings' deadlines."""
    async with responder_on(embedded_settings) as peer, door_on(embedded_settings, max_requests=1) as door:
        peer.hold = True
        async with raw(door) as (_, writer):
            writer.write(whole(json.dumps(RANK).encode()))
            await until(lambda: len(peer.held) == 1, "its ranking is with a worker")
        await until(
            lambda: door.count("requests_total", path="/v1/rank", status="499") == 1, "it is known to have left"
        )
        assert door.count("in_flight") == 0
        peer.hold = False
        assert await still_serves(door)


async def test_one_that_is_refused_for_load_gets_its_answer_whatever_it_still_sends(embedded_settings: Kafka) -> None:
    """A connection that is closed with unread bytes is reset, and the answer may be lost."""
    async with responder_on(embedded_settings) as peer, door_on(embedded_settings, max_requests=1) as door:
        peer.hold = True
        asked = asyncio.create_task(door.ask("POST", "/v1/rank", RANK))
        await until(lambda: len(peer.held) == 1, "the only place is taken")
        async with raw(door) as (reader, writer), asyncio.timeout(WITHIN_S):
            for _ in range(2):
                writer.write(whole(b" " * 300_000))
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                refusal = json.loads(await reader.readexactly(length))
                assert (head.split(b" ", 2)[1], refusal["error"]) == (b"429", "overloaded")
        peer.release()
        assert (await asked).status == 200


async def test_a_stop_answers_what_was_accepted_and_takes_nothing_more(embedded_settings: Kafka) -> None:
    async with responder_on(embedded_settings) as peer, door_on(embedded_settings) as door:
        peer.hold = True
        async with raw(door) as (idle, _):
            asked = asyncio.create_task(door.ask("POST", "/v1/rank", RANK))
            await until(lambda: len(peer.held) == 1, "accepted")
            door.context.stop.set()
            async with asyncio.timeout(WITHIN_S):
                assert await idle.read() == b""  # closed at once
            with pytest.raises(ConnectionRefusedError):
                await door.ask("GET", "/healthz")
            assert not asked.done()
            peer.release()
            answer = await asked
            assert (answer.status, answer.headers["connection"]) == (200, "close")
        async with asyncio.timeout(WITHIN_S):
            await door.task


async def test_https_is_served_to_who_trusts_the_certificate_and_to_nobody_in_the_clear(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    authority, file = trustme.CA(), tmp_path / "gateway.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(file))
    async with responder_on(embedded_settings), door_on(embedded_settings, tls_certificate=str(file)) as door:
        with pytest.raises((OSError, http.client.HTTPException)):
            await door.ask("GET", "/readyz")
        door.trust = ssl.create_default_context()
        with pytest.raises(ssl.SSLCertVerificationError):
            await door.ask("GET", "/readyz")
        authority.configure_trust(door.trust)
        assert (await door.ask("POST", "/v1/rank", RANK)).value["scores"] == [[11, -11], [30, -30], [20, -20]]


@pytest.mark.parametrize("content", ["no certificate", "a key with a password"])
async def test_a_certificate_of_no_use_ends_the_start_naming_its_file(
    content: str, embedded_settings: Kafka, tmp_path: Path
) -> None:
    file, said = tmp_path / "file.pem", ".*in PEM form"
    file.write_text(content)
    if content.startswith("a key"):
        own, said = trustme.CA().issue_cert("127.0.0.1"), r".*has a password.*openssl pkey"
        key = load_pem_private_key(own.private_key_pem.bytes(), None)
        encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x"))
        file.write_bytes(encrypted + own.cert_chain_pems[0].bytes())
    with pytest.raises(ConfigError, match=rf"gateway.tls_certificate .*file\.pem{said}"):
        async with responder_on(embedded_settings), door_on(embedded_settings, tls_certificate=str(file)):
            pass


async def test_without_a_valid_token_nothing_is_done(embedded_settings: Kafka, subtests: pytest.Subtests) -> None:
    verbs = (("POST", "/v1/rank"), ("POST", "/v1/announce"), ("DELETE", "/v1/requests/r-1"))
    async with responder_on(embedded_settings) as peer, door_on(embedded_settings) as door:
        for token, (method, path) in product(("", "wrong-but-long-enough", TOKEN[:-1], TOKEN.upper()), verbs):
            with subtests.test(f"{method} {path} with {token!r}"):
                found = await door.ask(method, path, json.dumps(RANK), token_=token)
                assert (found.status, found.headers["www-authenticate"]) == (401, 'Bearer realm="relaygr"')
        valid = base64.b64encode(f"anyone:{TOKEN}".encode()).decode()
        for scheme, (method, path) in product(("Basic", "basic", "BASIC"), verbs):
            with subtests.test(f"{method} {path} with {scheme}: a browser sends it along on its own"):
                found = await door.ask(method, path, RANK, token_="", authorization=f"{scheme} {valid}")
                assert (found.status, found.headers["www-authenticate"]) == (401, 'Bearer realm="relaygr"')
        for credentials in ("é", "====", base64.b64encode(b"\xff").decode(), base64.b64encode(b"me:wrong").decode()):
            with subtests.test(f"the page with {credentials!r}"):
                found = await door.ask("GET", "/", authorization=f"Basic {credentials}", token_="")
                assert (found.status, found.headers["www-authenticate"]) == (401, 'Basic realm="relaygr"')
        assert not (peer.requests or peer.events or peer.cancels)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (Gateway(tokens="shop:short"), "entry 1 is not TENANT:TOKEN"),
        (Gateway(tokens=f"shop:{TOKEN}\n{OTHER}"), "entry 2 is not"),
        (Gateway(tokens=f"shop:{TOKEN} library:{TOKEN}"), "entry 2 has the token of another tenant"),
        (Gateway(host="0.0.0.0"), "gateway.tokens is empty"),
        (Gateway(tokens=f"{129 * 's'}:{TOKEN}"), "the tenant of entry 1 has more than 128 characters"),
        (Gateway(tokens=f"sh\x7fop:{TOKEN}"), "or control characters"),
        (Gateway(tokens=f"shop:more:{TOKEN}"), "entry 1 has more than one colon"),
        (Gateway(tokens=f"library:{OTHER} shop:{TOKEN}:{TOKEN}"), "entry 2 has more than one colon"),
        (Gateway(tokens=f"shop:{TOKEN}é"), "printable ASCII"),
        (Gateway(tokens=f":{TOKEN}"), "entry 1 names no tenant"),
        (Gateway(tokens=f"shop:{TOKEN}, :{OTHER}"), "entry 2 names no tenant"),
    ],
)
def test_tokens_that_are_none_are_refused_without_being_shown(settings: Gateway, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as raised:
        TenantTokens(settings)
    assert TOKEN not in str(raised.value)
    assert TOKEN not in repr(settings)
