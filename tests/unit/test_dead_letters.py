"""Dead letters as an operator sees them: any bytes can be shown, and nothing is sent twice."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Gauge
from rich.console import Console

from relaygr_stream.bus.away import Away
from relaygr_stream.bus.dead_letter import MAX_DETAIL_BYTES, WAITING_BYTES, DeadLetters, dead_letter_headers
from relaygr_stream.bus.producer import Producer
from relaygr_stream.errors import BrokerError, DecodeError, InputError
from relaygr_stream.ops.dead_letters import replay as replaying
from relaygr_stream.ops.dead_letters.letter import Letter, letters_of, show_value
from relaygr_stream.ops.dead_letters.replay import choose, verdict_before
from relaygr_stream.ops.dead_letters.table import as_json, line_of, print_letter, print_letters
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.printable import SafeConsole
from relaygr_stream.wire.records import HEADER_DETAIL, HEADER_REASON, HEADER_REPLAY_OF, HEADER_REPLAYS, Record
from relaygr_stream.wire.topic_files import load_topics
from tests.done import DoneRecords

TOPICS = load_topics(Kafka(prefix="t."))


def record(offset: int, headers: list[tuple[str, bytes]], value: bytes = b"v", key: bytes | None = b"u") -> Record:
    return Record("t.dead-letter", 0, offset, 1_000 + offset, key, value, tuple(headers))


def dead(offset: int, value: bytes = b"v", original: tuple[tuple[str, bytes], ...] = ()) -> Record:
    bad = Record("t.ranking", 3, 17, 0, b"u", value, original)
    return record(offset, dead_letter_headers(bad, DecodeError("malformed", "no map")), value)


def test_reason_and_origin_are_ours_and_the_originals_headers_are_kept() -> None:
    (letter,) = letters_of([dead(5, original=(("trace", b"abc"), (HEADER_REASON, b"forged")))])
    assert (letter.reason, letter.detail) == ("malformed", "no map")
    assert (letter.origin_topic, letter.origin_partition, letter.origin_offset) == ("t.ranking", 3, 17)
    assert letter.headers == (("trace", b"abc"),)
    assert (letter.address, letter.replays, letter.replayed) == ("0:5", 0, False)


def test_a_marker_behind_it_says_that_a_letter_was_replayed() -> None:
    first, second = letters_of([dead(1), dead(2), record(3, [(HEADER_REPLAY_OF, b"0:2")], value=b"")])
    assert (first.replayed, second.replayed) == (False, True)


def test_a_bad_message_cannot_pose_as_a_marker() -> None:
    first, second = letters_of([dead(1), dead(2, value=b"", original=((HEADER_REPLAY_OF, b"0:1"),))])
    assert not first.replayed
    assert second.address == "0:2"


def test_what_was_replayed_is_not_replayed_again_unless_told_to() -> None:
    fresh, marked = letters_of([dead(1), dead(2), record(3, [(HEADER_REPLAY_OF, b"0:2")], value=b"")])
    (back,) = letters_of([dead(9, original=((HEADER_REPLAYS, b"1"),))])
    assert back.replays == 1
    assert [verdict_before(letter, TOPICS, again=False) for letter in (fresh, marked, back)] == [
        "would replay",
        "replayed before",
        "came back",
    ]
    assert {verdict_before(letter, TOPICS, again=True) for letter in (fresh, marked, back)} == {"would replay"}
    killer = dataclasses.replace(fresh, reason="crashed")
    assert [verdict_before(killer, TOPICS, again=again) for again in (False, True)] == ["ended workers", "would replay"]


@pytest.mark.parametrize("topic", ["", "t.dead-letter", "elsewhere"])
def test_only_topics_of_the_relay_get_replays(topic: str) -> None:
    letter = Letter(0, 1, 0, None, b"", origin_topic=topic)
    assert verdict_before(letter, TOPICS, again=True) == "no origin"


def test_letters_are_chosen_by_address_reason_and_origin() -> None:
    letters = letters_of([dead(1), dead(2)])
    assert choose(letters, addresses=["0:2", "0:2"], reason="", origin="", prefix="t.", away=Away()) == [letters[1]]
    assert choose(letters, addresses=(), reason="malformed", origin="ranking", prefix="t.", away=Away()) == letters
    assert choose(letters, addresses=(), reason="", origin="t.ranking", prefix="t.", away=Away()) == letters
    assert choose(letters, addresses=(), reason="invalid", origin="", prefix="t.", away=Away()) == []
    with pytest.raises(InputError, match=r"0:7.*PARTITION:OFFSET"):
        choose(letters, addresses=["0:7"], reason="", origin="", prefix="t.", away=Away())
    prod = [dataclasses.replace(each, origin_topic="prod-ranking") for each in letters]
    for origin in ("ranking", "prod-ranking"):
        assert choose(prod, addresses=(), reason="", origin=origin, prefix="prod-", away=Away()) == prod
    with pytest.raises(InputError, match="--from rankings: no such topic; the topics are retrieval"):
        choose(letters, addresses=(), reason="", origin="rankings", prefix="t.", away=Away())


def test_a_value_of_an_unknown_schema_is_shown() -> None:
    value = msgpack.packb({"v": 9, "name": "x" * 200, 7: [1, 2.5, None], "blob": bytes(100)})
    shown = show_value(value)
    assert shown["v"] == 9
    assert shown["7"] == [1, 2.5, None]
    assert "200 characters" in shown["name"]
    assert shown["blob"].startswith("100 bytes: 00")
    assert "not MessagePack" in show_value(b"\xc1 hello")


@given(st.binary(max_size=2000) | st.recursive(st.none() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary()
       | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 9), inner)).map(
           msgpack.packb))  # fmt: skip
def test_any_bytes_become_one_line_of_json(value: bytes) -> None:
    (letter,) = letters_of([dead(1, value=value)])
    line = as_json(letter, value=True)
    assert "\n" not in line
    assert json.loads(line)["bytes"] == len(value)


def test_nested_headers_are_refused_rather_than_built() -> None:
    bomb = b"\xdd\xff\xff\xff\xff" * 400
    assert "not MessagePack" in show_value(bomb)
    assert "not MessagePack" in show_value(b"\x91" * 5000)


@pytest.mark.parametrize("nested", [b"\x91", b"\x81\xa1a"])
def test_what_nests_as_deeply_as_can_be_unpacked_is_shown_to_some_depth(nested: bytes) -> None:
    shown = json.dumps(show_value(nested * 500 + b"\x01"))
    assert "(1 more, nested)" in shown


def test_headers_without_a_value_are_taken_for_empty_ones() -> None:
    """Kafka allows null; whoever may write to the topic can send it."""
    null: Any = [(HEADER_REASON, None), ("trace", None)]
    (letter,) = letters_of([record(3, null)])
    assert (letter.reason, letter.headers) == ("", (("trace", b""),))
    assert json.loads(as_json(letter, value=True))["headers"] == {"trace": ""}


@pytest.mark.parametrize("timestamp_ms", [-(1 << 63), (1 << 63) - 1, -1])
def test_any_clock_can_be_shown(timestamp_ms: int) -> None:
    line = as_json(Letter(0, 1, timestamp_ms, b"u", b"v"), value=False)
    assert json.loads(line)["time"]


async def test_a_message_that_was_sent_and_cannot_be_marked_is_not_called_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every further run would send all of them again, so it stops."""
    sent: list[str] = []

    class Granted(Producer):
        async def start(self) -> None: ...
        async def stop(self) -> None: ...
        async def send_and_wait(self, topic: str, value: bytes | None, **more: Any) -> int:
            sent.append(topic)
            if topic == TOPICS.dead_letter.name:
                raise BrokerError("no WRITE")
            return 0

    monkeypatch.setattr(replaying, "Producer", Granted)
    letters, verdicts = letters_of([dead(1), dead(2)]), list[str]()
    with pytest.raises(BrokerError, match="0:1 was replayed, and could not be marked as that: no WRITE"):
        await replaying.replay(
            Kafka(),
            TOPICS,
            letters,
            again=False,
            report=lambda letter, verdict, detail: verdicts.append(verdict),
            away=Away(),
        )
    assert verdicts == ["replayed"]
    assert sent == ["t.ranking", "t.dead-letter"]


@pytest.mark.parametrize("error", [None, BrokerError("no WRITE")], ids=["marked", "not marked"])
async def test_a_replay_that_is_stopped_marks_what_it_has_sent_or_says_so(
    monkeypatch: pytest.MonkeyPatch, error: BrokerError | None
) -> None:
    """Without its marker, the next run would send the message a second time."""
    sent: list[str] = []
    marking, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Producer):
        async def start(self) -> None: ...
        async def stop(self) -> None: ...
        async def send_and_wait(self, topic: str, value: bytes | None, **more: Any) -> int:
            if topic == TOPICS.dead_letter.name:
                marking.set()
                await go_on.wait()
                if error is not None:
                    raise error
            sent.append(topic)
            return 0

    monkeypatch.setattr(replaying, "Producer", Slow)
    letters = letters_of([dead(1), dead(2)])
    replay = asyncio.create_task(
        replaying.replay(
            Kafka(), TOPICS, letters, again=False, report=lambda letter, verdict, detail: None, away=Away()
        )
    )
    await marking.wait()
    replay.cancel()
    await asyncio.sleep(0)
    go_on.set()
    if error is None:
        with pytest.raises(asyncio.CancelledError):
            await replay
        assert sent == ["t.ranking", "t.dead-letter"]
    else:
        with pytest.raises(BrokerError, match="0:1 was replayed, and could not be marked as that: no WRITE"):
            await replay


def test_numbers_that_json_lacks_are_words() -> None:
    assert show_value(msgpack.packb([float("nan"), float("-inf"), 1.5])) == ["nan", "-inf", 1.5]


def test_a_letter_cannot_steer_the_terminal_of_its_reader() -> None:
    """Clear the screen, set the title, begin a line that looks like ours; in 7 and in 8 bits."""
    evil = "\x1b[2J\x1b]0;owned\x07\r\n\x9b31m"
    letter = Letter(0, 1, 0, evil.encode(), msgpack.packb(evil), reason=evil, detail=evil, origin_topic=evil)
    out = io.StringIO()
    console = Console(file=out, width=400, force_terminal=False)
    print_letters(console, [letter])
    print_letter(console, letter)
    out.write(line_of(letter, "no origin", evil) + as_json(letter, value=True))
    assert not [each for each in out.getvalue() if each != "\n" and (ord(each) < 32 or 127 <= ord(each) < 160)]


def listed(letters: list[Letter], *, terminal: bool) -> list[str]:
    out = io.StringIO()
    print_letters(SafeConsole(file=out, width=80, force_terminal=terminal, color_system=None), letters)
    return out.getvalue().splitlines()


LONGEST = Letter(
    15, 123_456_789, 1_700_000_000_000, bytes(range(250, 256)) * 8, b"v" * 1000, "unknown_version", "of a reader " * 15,
    "relaygr.pre-infer", 127, 9_876_543_210,
)  # fmt: skip


def test_the_list_fits_a_terminal_of_80_columns_and_loses_nothing() -> None:
    lines = listed([*letters_of([dead(1)]), LONGEST], terminal=True)
    assert lines[0].split() == ["address", "when", "(UTC)", "reason", "from"]
    assert lines[1].startswith("0:1 ") and "malformed" in lines[1] and "t.ranking[3]@17" in lines[1]
    assert lines[2].split() == ["key", "u,", "1", "bytes:", "no", "map"]
    assert max(len(line.rstrip()) for line in lines) <= 80
    text = " ".join(" ".join(lines).split())
    assert text.count("of a reader") == 15
    assert "key 0xfafbfcfdfeff" in text
    assert lines[-1] == "2 dead letters: 1 malformed, 1 unknown_version"


def test_in_a_pipe_each_letter_is_one_whole_line() -> None:
    head, first, second, total = listed([*letters_of([dead(1)]), LONGEST], terminal=False)
    assert head.split()[0] == "address"
    assert first.split()[-5:] == ["u,", "1", "bytes:", "no", "map"]
    assert second.count("of a reader") == 15
    assert total == "2 dead letters: 1 malformed, 1 unknown_version"


@pytest.mark.parametrize(
    ("key", "text"), [(b"user-1", "user-1"), (b"\x00\x01", "0x0001"), (b"\xff", "0xff"), (None, None), (b"", "")]
)
def test_binary_ids_are_hexadecimal(key: bytes | None, text: str | None) -> None:
    assert json.loads(as_json(Letter(0, 1, 0, key, b"v"), value=False))["key"] == text


def test_a_reason_that_there_is_not_is_an_error() -> None:
    letters = letters_of([dead(1)])
    with pytest.raises(
        InputError, match=r"--reason malfromed: no such reason; the reasons are crashed, invalid, malformed"
    ):
        choose(letters, addresses=(), reason="malfromed", origin="", prefix="t.", away=Away())
    later = Letter(0, 9, 0, b"u", b"v", reason="of_a_later_release")
    assert choose(
        [*letters, later], addresses=(), reason="of_a_later_release", origin="", prefix="t.", away=Away()
    ) == [later]


def test_a_detail_that_is_no_unicode_can_be_dead_lettered() -> None:
    headers = dead_letter_headers(record(1, []), DecodeError("invalid", "user \ud800"))
    assert (HEADER_DETAIL, b"user \\ud800") in headers


@pytest.mark.parametrize("detail", ["x" * 10**6, "\ud800" * 10**6])
def test_a_detail_is_bounded(detail: str) -> None:
    headers = dict(dead_letter_headers(record(1, []), DecodeError("invalid", detail)))
    assert len(headers[HEADER_DETAIL]) == MAX_DETAIL_BYTES


async def test_what_waits_is_bounded_in_bytes_too() -> None:
    """A thousand of them may wait, but not of a megabyte each. None leaves here: the producer is not connected."""
    background = Background()
    letters = DeadLetters(
        Producer(Kafka(), client_id="test"), load_topics(Kafka()).dead_letter, DoneRecords(),
        Gauge("waiting", "", registry=None), background, keep_values=True,
    )  # fmt: skip
    large = record(1, [], bytes(512 * 1024))
    most = WAITING_BYTES // (512 * 1024)
    for number in range(most):
        assert not letters.full, number
        letters.send(large, DecodeError("invalid", "for the test"))
    assert letters.full
    await background.end()
    await asyncio.sleep(0)
    assert not letters.full
