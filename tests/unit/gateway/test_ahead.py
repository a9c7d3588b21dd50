"""What a client may send ahead: one request at a time, one answer each; heads, offers to upgrade, chunks."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import product

import psutil
import pytest

from relaygr_stream.gateway.bodies import longest_body
from relaygr_stream.gateway.connection import MAX_FIELDS, HttpConnection
from relaygr_stream.settings.schema import Kafka, Relay
from tests.unit.client_peers import responder_on
from tests.unit.gateway.doors import RANK, OpenDoor, door_on
from tests.unit.gateway.test_hostile import HEAD, raw, still_serves, whole
from tests.waiting import WITHIN_S, until

GET = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = json.dumps(RANK).encode()
MIB = 1 << 20
MOST = longest_body(Relay())


async def pushed(door: OpenDoor, data: bytes, at_most: int = 0) -> tuple[int, bytes]:
    """Bytes taken of `data`, sent again up to at_most bytes, and what was answered until the gateway closes."""
    sent, answered = 0, bytearray()
    async with raw(door) as (reader, writer), asyncio.timeout(WITHIN_S):

        async def read() -> None:
            try:
                while some := await reader.read(1 << 16):
                    answered.extend(some)
            except ConnectionError:
                pass

        reading = asyncio.create_task(read())
        try:
            while True:
                writer.write(data)
                await writer.drain()
                sent += len(data)
                if sent >= at_most or reading.done():
                    break
        except ConnectionError:
            pass
        await reading
    return sent, bytes(answered)


def statuses(answered: bytes) -> list[int]:
    return [int(part[:3]) for part in answered.split(b"HTTP/1.1 ")[1:]]


BEHIND = {
    "request": GET,
    "many": GET * 3000,
    "ranking": whole(BODY),
    "huge body": HEAD + b"content-length: 400000000\r\n\r\n",
    "nonsense": b"nonsense\r\n\r\n",
    "zeros": b"\0" * 999,
}


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> set[HttpConnection]:
    """The gateway's that are open."""
    found: set[HttpConnection] = set()
    made, lost = HttpConnection.connection_made, HttpConnection.connection_lost

    def add(each: HttpConnection, transport: asyncio.Transport) -> None:
        found.add(each)
        made(each, transport)

    def discard(each: HttpConnection, error: Exception | None) -> None:
        lost(each, error)
        found.discard(each)

    monkeypatch.setattr(HttpConnection, "connection_made", add)
    monkeypatch.setattr(HttpConnection, "connection_lost", discard)
    return found


async def test_a_request_before_the_last_answer_is_complete_is_not_read(
    embedded_settings: Kafka, connections: set[HttpConnection], subtests: pytest.Subtests
) -> None:
    async with responder_on(embedded_settings) as peer, door_on(embedded_settings, read_ms=60_000.0) as door:
        for (name, behind), sends in product(BEHIND.items(), (1, 2)):
            with subtests.test(f"{name} in {sends} sends"):
                peer.hold = True
                before = len(peer.requests)
                async with raw(door) as (reader, writer), asyncio.timeout(WITHIN_S):
                    writer.write(whole(BODY) + behind * (sends == 1))
                    await until(lambda: len(peer.held) == 1, "the first is with a worker")
                    (ours,) = connections
                    if sends == 2:
                        writer.write(behind)
                        await until(lambda: ours._deaf, "what is behind has come")  # noqa: B023
                    peer.release()
                    answered = await reader.read()
                assert statuses(answered) == [200]
                assert b"connection: close" in answered
                assert len(peer.requests) == before + 1
                peer.hold = False
                assert await still_serves(door)
                await until(lambda: not connections, "its connections are gone")


async def test_one_connection_makes_the_gateway_hold_nothing_and_stops_nobody(embedded_settings: Kafka) -> None:
    """By pipelining, one connection made it hold 53 bytes for each byte sent, and stopped its loop for seconds."""
    process = psutil.Process()

    async def longest_stop(*bursts: bytes) -> float:
        """Seconds for which this loop, the gateway's too, did not run while 20 clients sent each of these."""
        longest, last = 0.0, time.perf_counter()

        async def watch() -> None:
            nonlocal longest, last
            while True:
                await asyncio.sleep(0)
                now = time.perf_counter()
                longest, last = max(longest, now - last), now

        watching = asyncio.create_task(watch())
        for burst in bursts:
            await asyncio.gather(*(pushed(door, burst) for _ in range(20)))
        watching.cancel()
        return longest

    async with responder_on(embedded_settings), door_on(embedded_settings, read_ms=60_000.0) as door:
        closing = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        calm = max([await longest_stop(closing) for _ in range(3)])
        before = process.memory_info().rss
        for data in (GET * 7000, GET * 3000 + HEAD + b"content-length: 400000000\r\n\r\n" + b"x" * MIB):
            sent, answered = await pushed(door, data, 32 * MIB)
            assert statuses(answered) in ([200], [])  # none: reset, since it went on sending
            assert sent < 32 * MIB
        assert process.memory_info().rss - before < 16 * MIB
        burst = GET * 7000
        assert min([await longest_stop(burst) for _ in range(3)]) < 10 * max(calm, 0.01)
        assert await still_serves(door)


H2C = b"Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"
OFFERS = {
    "h2c": b"Connection: " + H2C,
    "websocket": b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: eA==\r\nsec-websocket-version: 13",
    "several": b"CONNECTION: keep-alive, uPgRaDe\r\nUPGRADE: TLS/1.0, h2c, websocket\r\nupgrade: IRC/6.9",
    "unknown": b"Connection: Upgrade\r\nUpgrade: \xe9/2",
}


async def test_an_offer_to_upgrade_is_ignored(embedded_settings: Kafka, subtests: pytest.Subtests) -> None:
    """By RFC 9110, 7.8. The JDK's HttpClient and curl --http2 offer h2c, and were answered 400, or twice."""
    async with responder_on(embedded_settings), door_on(embedded_settings, read_ms=60_000.0) as door:
        for name, offer in OFFERS.items():
            await ignored(door, name, offer, subtests)


async def ignored(door: OpenDoor, offered: str, offer: bytes, subtests: pytest.Subtests) -> None:
    length, chunked = b"content-length: %d" % len(BODY), b"transfer-encoding: chunked"
    chunks = b"%x;a=b\r\n%b\r\n%x\r\n%b\r\n0\r\nx: y\r\n\r\n" % (9, BODY[:9], len(BODY) - 9, BODY[9:])
    post, again = HEAD + offer + b"\r\n", b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    asked = {
        "one send": ([post + length + b"\r\n\r\n" + BODY], 200),
        "body alone": ([post + length + b"\r\n\r\n", BODY], 200),
        "byte by byte": ([bytes([byte]) for byte in post + length + b"\r\n\r\n" + BODY], 200),
        "chunks": ([post + chunked + b"\r\n\r\n" + chunks], 200),
        "chunks alone": ([post + chunked + b"\r\n\r\n", chunks], 200),
        "get": ([b"GET /readyz HTTP/1.1\r\nhost: x\r\n" + offer + b"\r\n\r\n"], 200),
        "malformed": ([post + b"content-length: 1\r\n\r\n[" + b""], 400),
    }
    for name, (sends, status) in asked.items():
        with subtests.test(f"{offered}, {name}"):
            async with raw(door) as (reader, writer), asyncio.timeout(WITHIN_S):
                for data in sends:
                    writer.write(data)
                    await writer.drain()
                    await asyncio.sleep(0)
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(size)
                assert statuses(head) == [status]
                writer.write(again)
                assert statuses(await reader.read()) == [200]
    with subtests.test(f"{offered}, expect"):
        async with raw(door) as (reader, writer), asyncio.timeout(WITHIN_S):
            writer.write(post + length + b"\r\nexpect: 100-continue\r\n\r\n")
            assert statuses(await reader.readuntil(b"\r\n\r\n")) == [100]
            writer.write(BODY + b"")
            assert statuses(await reader.readuntil(b"\r\n\r\n")) == [200]
    with subtests.test(f"{offered}, pipelined"):
        _, answered = await pushed(door, post + length + b"\r\n\r\n" + BODY + again)
        assert statuses(answered) == [200]
    with subtests.test(f"{offered}, connect"):
        _, answered = await pushed(door, b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n" + offer + b"\r\n\r\n")
        assert statuses(answered) == [400]


def head_of(size: int, kind: str) -> bytes:
    start = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    left = size - len(start) - 2
    if kind == "url":
        return start.replace(b"/healthz", b"/healthz?" + b"u" * (left - 1)) + b"\r\n"
    fields = [b"x-%03d: %b\r\n" % (number, b"y" * 91) for number in range(left // 100)]
    return b"".join([start, *(fields if kind == "fields" else [b"x: " + b"y" * (left - 5) + b"\r\n"]), b"\r\n"])


async def test_a_head_is_bounded_however_it_comes(embedded_settings: Kafka, subtests: pytest.Subtests) -> None:
    """One that came in one send with its end was taken, whatever its length."""
    sizes = ((16 << 10, 200), (17 << 10, 431), (64 << 10, 431), (200 << 10, 431))
    async with responder_on(embedded_settings), door_on(embedded_settings, read_ms=60_000.0) as door:
        for kind, (size, status), whole_head in product(("url", "field", "fields"), sizes, (True, False)):
            head, piece = head_of(size, kind), size if whole_head else 1000
            with subtests.test(f"{kind}, {size} bytes, {piece} a send"):
                async with raw(door) as (reader, writer), asyncio.timeout(WITHIN_S):
                    for at in range(0, len(head), piece):
                        writer.write(head[at : at + piece])
                        await writer.drain()
                    assert statuses(await reader.read()) == [status]
        with subtests.test("fields without content"):
            tiny = b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * (MAX_FIELDS + 1) + b"\r\n"
            assert statuses((await pushed(door, tiny))[1]) == [431]


async def test_what_comes_beside_a_body_is_bounded(embedded_settings: Kafka, subtests: pytest.Subtests) -> None:
    """Chunks of one byte cost a callback each, and extensions are read by nobody."""
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    padded = BODY + b" " * (200_000 - len(BODY))
    small = b"".join(b"8\r\n%b\r\n" % padded[at : at + 8] for at in range(0, len(padded), 8)) + b"0\r\n\r\n"
    beside = {
        "small chunks": (small, [200]),
        "bytes": (b"1\r\n \r\n" * 200_000, [431]),
        "an extension": (b"1;" + b"e" * 40_000 + b"\r\n \r\n", [431]),
        "extensions": (b"1;eeeeeeeeeeeeeee\r\n \r\n" * 2000, [431]),
        "trailers": (b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY) + b"t: r\r\n" * 20_000, [431]),
    }
    async with responder_on(embedded_settings), door_on(embedded_settings, read_ms=60_000.0) as door:
        for name, (body, found) in beside.items():
            with subtests.test(name):
                data = chunked + body
                async with raw(door) as (reader, writer), asyncio.timeout(WITHIN_S):
                    writer.write(data)
                    assert statuses(await reader.readuntil(b"\r\n\r\n")) == found
        assert await still_serves(door)


async def test_a_body_behind_its_answer_is_bounded_and_answered_once(embedded_settings: Kafka) -> None:
    """It was read on for gateway.read_ms, without a token; one that was malformed got a second answer."""
    head = b"POST /nowhere HTTP/1.1\r\nhost: x\r\n"
    async with responder_on(embedded_settings), door_on(embedded_settings, read_ms=60_000.0) as door:
        for data in (
            head + b"content-length: 400000000\r\n\r\n" + b"x" * MIB,
            head + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 1000 + b"nonsense" * (MIB // 8),
        ):
            sent, answered = await pushed(door, data, 64 * MIB)
            assert statuses(answered) in ([404], [400], [])  # 400: what is wrong came with the head; none: reset
            assert sent < 64 * MIB
        assert await still_serves(door)


REFUSED = (
    (b"content-type: application/json", 1, 413),
    (b"content-type: application/json", MOST, 413),
    (b"content-type: text/plain", 0, 415),
    (b"content-type: application/json\r\nrelaygr-timeout-ms: soon", 0, 400),
)


async def test_who_sends_all_of_a_body_that_is_refused_gets_the_answer_and_may_go_on(
    embedded_settings: Kafka, subtests: pytest.Subtests
) -> None:
    """It was reset while it sent, and many clients read nothing until they have sent all."""
    async with responder_on(embedded_settings), door_on(embedded_settings, max_rate=1e6) as door:
        for field, beyond, status in REFUSED:
            with subtests.test(f"{status}, {beyond} beyond"):
                async with raw(door) as (reader, writer), asyncio.timeout(WITHIN_S):
                    writer.write(HEAD + b"%b\r\ncontent-length: %d\r\n\r\n" % (field, MOST + beyond))
                    assert (await door.ask("GET", "/healthz")).status == 200  # it has had time to answer, and to close
                    writer.write(b" " * (MOST + beyond))
                    await writer.drain()
                    assert statuses(await reader.readuntil(b"\r\n\r\n")) == [status]
                    await reader.readuntil(b"}")
                    writer.write(GET)
                    assert statuses(await reader.readuntil(b"\r\n\r\n")) == [200]
