"""Whatever a broker's answer holds, a consumer gets past it: each offset is handed out once, as a record or a stand-in.

Through aiokafka's own fetcher; the broker is played. On brokers: tests/bus/test_unreadable.py.
"""

from __future__ import annotations

import asyncio
import gzip
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import cramjam
import pytest
from aiokafka import TopicPartition
from aiokafka.consumer import fetcher
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatch, _DefaultRecordBatchBuilderPy
from aiokafka.record.util import calc_crc32c
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.bus.record_walk import walk
from relaygr_stream.bus.unreadable import (
    HEADER,
    MOST_RECORDS,
    STAND_INS,
    UNPACKED_BYTES,
    pass_unreadable,
)
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION, HEADER_UNREADABLE, MOST_HEADERS

HERE = TopicPartition("t", 0)
#: Fetches after which a reader that has not come to the end goes round in circles.
MOST_FETCHES = 100


class Log:
    """A partition, and a broker's answers: from the batch on that holds the offset asked for."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, bytes]] = []  # where each ends, whatever its bytes say
        self.end = 0
        self.stated_end: int | None = None  # lower: the rest was committed while the broker answered

    def append(self, batch: bytes, records: int) -> None:
        self.end += records
        self.batches.append((self.end, batch))

    def answer(self, offset: int) -> bytes:
        return b"".join(batch for end, batch in self.batches if end > offset)


async def read(log: Log, *, check_crcs: bool) -> list[Any]:
    """Everything, in as many fetches as it takes."""
    subscriptions = SubscriptionState()
    subscriptions.assign_from_user([HERE])
    assignment = subscriptions.subscription.assignment

    async def answer(node: int, request: Any) -> Any:
        offset = assignment.state_value(HERE).position
        stated = log.end if log.stated_end is None else log.stated_end
        content = [(HERE.partition, 0, stated, stated, None, log.answer(offset))]
        return SimpleNamespace(API_VERSION=4, topics=[(HERE.topic, content)])

    client = SimpleNamespace(_loop=asyncio.get_running_loop(), _metadata_max_age_ms=1, send=answer)
    reader = Fetcher(client, subscriptions, check_crcs=check_crcs)
    reader._fetch_task.cancel()  # one fetch at a time, by hand
    pass_unreadable(SimpleNamespace(_fetcher=reader))
    assignment.state_value(HERE).seek(0)
    found: list[Any] = []
    for _ in range(MOST_FETCHES):
        position = assignment.state_value(HERE).position
        if position >= log.end:
            return found
        request = SimpleNamespace(topics=[(HERE.topic, [(HERE.partition, position, 0)])])
        assert await reader._proc_fetch_request(assignment, 0, request)
        found += (await reader.fetched_records([HERE])).get(HERE, [])
    raise AssertionError(f"at {assignment.state_value(HERE).position} after {MOST_FETCHES} fetches")


def everything(log: Log, *, check_crcs: bool = True) -> list[Any]:
    records = asyncio.run(read(log, check_crcs=check_crcs))
    assert [record.offset for record in records[:-1]] == sorted({record.offset for record in records[:-1]})
    return records


def batch_of(values: list[bytes], base: int, codec: int = 0, header: str = "h") -> bytes:
    builder = _DefaultRecordBatchBuilderPy(2, codec, 0, -1, -1, -1, 1 << 30)
    for offset, value in enumerate(values):
        builder.append(offset, 1_700_000_000_000, b"key", value, [(header, b"v")])
    batch = bytearray(builder.build())
    struct.pack_into(">q", batch, 0, base)
    return bytes(batch)


def log_of(*batches_: bytes) -> Log:
    log = Log()
    for batch in batches_:
        log.append(batch, HEADER.unpack_from(batch)[6] + 1)
    return log


FIRST, SECOND = batch_of([b"a" * 40, b"b", b"c"], 0), batch_of([b"d", b"e", b"f"], 3)
ALL = [b"a" * 40, b"b", b"c", b"d", b"e", b"f"]


@pytest.mark.parametrize("check_crcs", [True, False])
@pytest.mark.parametrize("stated_end", [0, 3, 5])
def test_what_is_committed_while_the_broker_answers_is_read(stated_end: int, check_crcs: bool) -> None:
    log = log_of(FIRST, SECOND)
    log.stated_end = stated_end
    assert [record.value for record in everything(log, check_crcs=check_crcs)] == ALL


@pytest.mark.parametrize("flipped_bit", [8 * 25, 8 * 60])
def test_what_lies_beyond_the_stated_end_is_read_only_with_its_checksum(flipped_bit: int) -> None:
    changed = bytearray(SECOND)
    changed[flipped_bit // 8] ^= 1 << flipped_bit % 8
    log = Log()
    for batch in (FIRST, bytes(changed)):
        log.append(batch, 3)
    log.stated_end = 3
    values = [record.value for record in everything(log, check_crcs=False)]
    assert values[:3] == ALL[:3]
    assert set(values[3:]) == {None}


@pytest.mark.parametrize("check_crcs", [True, False])
def test_any_flipped_bit_is_passed(check_crcs: bool) -> None:
    """Without checksums (as the trigger reads) values may be wrong; offsets never are."""

    async def flips() -> None:
        for which, batch in enumerate((FIRST, SECOND)):
            for bit in range(len(batch) * 8):
                flipped = bytearray(batch)
                flipped[bit // 8] ^= 1 << bit % 8
                both = [bytes(FIRST), bytes(SECOND)]
                both[which] = bytes(flipped)
                log = Log()
                for one in both:
                    log.append(one, 3)
                records = await read(log, check_crcs=check_crcs)
                assert [record.offset for record in records] == list(range(6)), f"bit {bit} of batch {which}"
                if check_crcs and bit >= 8 * 8:  # the base offset is the one field that nothing protects
                    other = records[3:] if which == 0 else records[:3]
                    assert [record.value for record in other] == (ALL[3:] if which == 0 else ALL[:3]), f"bit {bit}"

    asyncio.run(flips())


@given(
    st.lists(st.one_of(st.binary(min_size=1, max_size=200), st.sampled_from([FIRST, SECOND, SECOND[:80]])), max_size=4)
)
def test_any_bytes_are_passed(parts: list[bytes]) -> None:
    log = Log()
    for part in parts:
        log.append(part, 3)
    for check_crcs in (True, False):
        records = asyncio.run(read(log, check_crcs=check_crcs))
        assert [record.offset for record in records] == sorted({record.offset for record in records})


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
def test_every_codec_is_read(codec: int) -> None:
    records = everything(log_of(batch_of(ALL[:3], 0, codec), SECOND))
    assert [record.value for record in records] == ALL


def test_snappy_as_librdkafka_writes_it_is_read() -> None:
    """Without the Java client's frame."""
    assert [r.value for r in everything(log_of(packed(FIRST, 2, cramjam.snappy.compress_raw), SECOND))] == ALL


def packed(batch: bytes, codec: int, pack: Callable[[bytes], Any]) -> bytes:
    """With these bytes in place of its records; its checksum is right."""
    header = list(HEADER.unpack_from(batch))
    body = bytes(pack(batch[HEADER.size :]))
    header[1], header[5] = HEADER.size - 12 + len(body), codec
    whole = bytearray(HEADER.pack(*header) + body)
    struct.pack_into(">I", whole, 17, calc_crc32c(bytes(whole[21:])))
    return bytes(whole)


BOMB = bytes(UNPACKED_BYTES + 1)


@pytest.mark.parametrize(
    ("codec", "pack", "said"),
    [
        (1, lambda _: gzip.compress(BOMB, 1), "gzip"),
        (2, lambda _: cramjam.snappy.compress_raw(BOMB), "snappy"),
        (3, lambda _: cramjam.lz4.compress(BOMB), "lz4"),
        (4, lambda _: cramjam.zstd.compress(BOMB, 1), "zstd"),
        (1, lambda records: records, "gzip"),
        (2, lambda records: b"\x82SNAPPY\0" + bytes(8) + b"\xff\xff\xff\xff" + records, "snappy"),
        (3, lambda records: records, "lz4"),
        (4, lambda records: records, "zstd"),
        (5, lambda records: records, "codec 5"),
        (7, lambda records: records, "codec 7"),
    ],
)
def test_what_does_not_unpack_is_passed(codec: int, pack: Callable[[bytes], Any], said: str) -> None:
    records = everything(log_of(packed(FIRST, codec, pack), SECOND), check_crcs=False)
    assert [record.value for record in records] == [None, None, None, *ALL[3:]]
    assert all(said in dict(record.headers)[HEADER_UNREADABLE].decode() for record in records[:3])


def test_too_many_records_are_one_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two million records of seven bytes fit a compressed mebibyte; a stand-in for each would be a bomb in turn."""
    many = MOST_RECORDS + 1
    log = log_of(batch_of([b""] * many, 0, codec=4), batch_of([b"x"], many))
    *stand_ins, last = everything(log)
    assert (len(stand_ins), last.value) == (STAND_INS, b"x")
    assert f"{many - STAND_INS + 1} records from here on" in dict(stand_ins[-1].headers)[HEADER_UNREADABLE].decode()


def test_a_name_that_is_not_utf_8_is_told() -> None:
    class NotUtf8(str):
        def encode(self, *_: Any, **__: Any) -> bytes:
            return b"\xff\xfe"

    records = everything(log_of(batch_of([b"bad"], 0, header=NotUtf8("x")), batch_of([b"good"], 1)))
    assert [record.value for record in records] == [None, b"good"]
    assert b"not UTF-8" in dict(records[0].headers)[HEADER_UNREADABLE]


def test_other_consumers_of_the_process_are_left_alone() -> None:
    before = dict(vars(fetcher))
    everything(log_of(FIRST))
    assert vars(fetcher) == before


# ---- records with many headers ----

Headers = list[tuple[str, bytes | None]]
FLOOD: Headers = [("", None)] * 40_000
ADDRESS: Headers = [(HEADER_CORRELATION, b"call"), (HEADER_REPLY_PARTITION, b"3")]


def records_of(*records: tuple[bytes | None, bytes | None, Headers], codec: int = 0) -> Log:
    builder = _DefaultRecordBatchBuilderPy(2, codec, 0, -1, -1, -1, 1 << 30)
    for offset, (key, value, headers) in enumerate(records):
        builder.append(offset, 1_700_000_000_000, key, value, headers)
    return log_of(bytes(builder.build()))


@pytest.mark.parametrize("codec", [0, 1, 4])
def test_a_record_of_many_headers_is_refused_alone_and_keeps_where_to_answer(codec: int) -> None:
    log = records_of(
        (b"k", b"first", [("h", b"v")]),
        (b"k" * 300, b"x" * 300, [*ADDRESS, *FLOOD]),
        (None, b"last", []),
        codec=codec,
    )
    first, refused, last = everything(log)
    assert (first.value, first.headers, last.key, last.value) == (b"first", (("h", b"v"),), None, b"last")
    assert (refused.offset, refused.key, refused.value) == (1, None, None)
    assert refused.headers[1:] == tuple(ADDRESS)
    assert "has 40002 headers" in dict(refused.headers)[HEADER_UNREADABLE].decode()


def test_headers_of_a_refused_record_never_become_objects() -> None:
    log = records_of(*[(b"k", b"v", FLOOD)] * 4)
    tracemalloc.start()
    try:
        found = everything(log)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [record.value for record in found] == [None] * 4
    assert peak < 4 * 3 * len(log.batches[0][1]), "a few copies of the bytes, not 56 bytes for each of two"


@pytest.mark.parametrize(("more", "read"), [(0, True), (1, False)])
def test_the_bound_on_headers_is_exact(more: int, read: bool) -> None:
    (record,) = everything(records_of((b"k", b"v", [("h", None)] * (MOST_HEADERS + more))))
    assert (record.value == b"v") is read


sizes = st.none() | st.binary(max_size=3) | st.integers(60, 20_000).map(bytes)


@given(st.lists(st.tuples(sizes, sizes, st.integers(0, MOST_HEADERS + 3)), min_size=1, max_size=4))
def test_what_is_within_the_bound_is_read_as_it_was_sent(sent: list[tuple[bytes | None, bytes | None, int]]) -> None:
    headers: Headers = [("h", b"v")]
    found = everything(records_of(*((key, value, headers * count) for key, value, count in sent)))
    expected = [(key, value, count) if count <= MOST_HEADERS else (None, None, 1) for key, value, count in sent]
    assert [(record.key, record.value, len(record.headers)) for record in found] == expected


@given(st.binary(max_size=80), st.integers(-1, 5), st.data())
def test_a_decoder_reads_only_what_was_walked(content: bytes, count: int, data: st.DataObject) -> None:
    """Whatever the bytes: no record beyond the bound reaches the decoder, and what it gets it can read or refuse."""
    good = bytes(record_bytes(b"k", b"v", 2))
    at = data.draw(st.integers(0, len(good)))
    mixed = good + good[:at] + content
    found = walk(mixed, count + 1)
    batch = bytearray(FIRST[: HEADER.size])
    struct.pack_into(">i", batch, HEADER.size - 4, found.records)
    with suppress(CorruptRecordException, UnicodeDecodeError):
        for record in DefaultRecordBatch(bytes(batch) + bytes(found.content)):
            assert len(record.headers) <= MOST_HEADERS


def record_bytes(key: bytes, value: bytes, headers: int) -> bytes:
    return records_of((key, value, [("h", b"v")] * headers)).batches[0][1][HEADER.size :]
