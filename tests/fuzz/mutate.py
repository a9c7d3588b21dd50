"""Makes valid messages bad: in their structure (a field of another type, a number out of all bounds, a missing or an
unknown field, deep nesting) and in their bytes (flips, cuts, splices, lengths that lie)."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any, Final

import msgpack

from tests.fuzz.corpus import Headers

NAN, INF = float("nan"), float("inf")
I64_MAX, I64_MIN, U64_MAX = (1 << 63) - 1, -(1 << 63), (1 << 64) - 1

NUMBERS: Final[list[Any]] = [
    *(0, 1, -1, 2, 127, 255, 256, 65_535, 1_000_000, 1_000_001, 1 << 31, 1 << 32, 1 << 53, 1 << 62),
    *(I64_MAX, I64_MIN, U64_MAX, NAN, INF, -INF, -0.0, 5e-324, 1e308, -1e308, 3.6e6, 3.6e6 + 1, 0.5),
]
TEXTS: Final[list[str]] = [
    *(
        "",
        "\0",
        "u\0u",
        "\x1b[2J\x1b]0;owned\x07",
        "\r\nlevel=error",
        "w\nodd: a forged line",
        "\x9b31m",
        "\u202e",
        "\ufeff",
        "é",
        "💥",
    ),
    *("\ud800", "\udfff\ud800", "x" * 256, "x" * 257, "💥" * 256, "x" * 5000, "../../etc/passwd", "{}", "%s%n"),
    *("full", "ok", "serving", "stopped", "nan", "1e999", "u1", "w1"),
]
BYTES: Final[list[bytes]] = [b"", b"\0", b"\xff" * 3, b"\xff" * 4, b"\xff" * 8, b"\0" * 4096, b"\x80" * 257]
#: Times whose order or differences may overflow.
TIMES: Final = [
    I64_MIN,
    I64_MIN + 1,
    -(1 << 62) - 1,
    -(1 << 62),
    -1,
    0,
    1,
    (1 << 53),
    (1 << 62),
    (1 << 62) + 1,
    I64_MAX,
]
#: Prefixes that announce 4 G elements, or nest for ever.
LIES: Final = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc1",
]


#: An array of up to so many bytes may come 300 times over: beyond the limit of counts, not that of sizes.
LONG: Final = 2000


class Mutator:
    """Bad input from one stream of random numbers."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def value(self, plain: dict[str, Any]) -> bytes:
        """A message's bytes after some mutations: of its structure, of its bytes, or of both."""
        rng = self._rng
        raw = b""
        if rng.random() < 0.85:
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                self._change(plain)
        raw = _pack(plain)
        if rng.random() < 0.3:
            for _ in range(rng.choice((1, 1, 2, 5))):
                raw = self.garbled(raw)
        return raw

    def garbled(self, raw: bytes) -> bytes:
        """After one mutation of its bytes."""
        rng = self._rng
        at = rng.randrange(len(raw) + 1)
        ways: list[Callable[[], bytes]] = [
            lambda: raw[:at],
            lambda: raw[at:],
            lambda: raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :],
            lambda: raw[:at] + rng.randbytes(rng.randrange(1, 9)) + raw[at:],
            lambda: raw[:at] + raw[at + rng.randrange(1, 9) :],
            lambda: raw[:at] + rng.choice(LIES) + raw[at:],
            lambda: raw + raw[:at],
            lambda: self._nested() + raw,
            lambda: rng.randbytes(rng.randrange(64)),
        ]
        return rng.choice(ways)()

    def headers(self, headers: Headers) -> Headers:
        """Headers with names missing, doubled or foreign, and values null, long or of another alphabet."""
        rng = self._rng
        for _ in range(rng.choice((0, 1, 1, 2))):
            at = rng.randrange(len(headers)) if headers else 0
            name = headers[at][0] if headers else "trace"
            value = rng.choice(
                [None, b"", b"0", b"-1", b" 1", b"1_0", b"9" * 11, b"9" * 5000, b"\xff" * 64, b"\xff" * 65,
                 "\u0661".encode(), b"\xb2", b"1.0", b"0x1", b"\x1b[2J", rng.randbytes(rng.randrange(80))]
            )  # fmt: skip
            way = rng.randrange(4)
            if way == 0 and headers:
                headers = headers[:at] + headers[at + 1 :]
            elif way == 1 and headers:
                headers = [*headers[:at], (name, value), *headers[at + 1 :]]
            else:
                headers = [*headers, (rng.choice([name, "trace", "", "\0", "x" * 300]), value)]
        return headers

    def key(self) -> bytes | None:
        """Any key: none, no UTF-8, control characters, long."""
        rng = self._rng
        return rng.choice([None, b"", b"u1", b"\xff\xfe", b"\x1b[2J", b"k" * 3000, rng.randbytes(8)])

    def _change(self, plain: dict[str, Any]) -> None:
        rng = self._rng
        place = plain
        while inner := [v for v in place.values() if isinstance(v, dict) and v] or [
            each for v in place.values() if isinstance(v, (list, tuple)) for each in v if isinstance(each, dict)
        ]:
            if rng.random() < 0.5:
                break
            place = rng.choice(inner)
        name = rng.choice(list(place)) if place else "v"
        way = rng.random()
        if way < 0.08:
            place.pop(name, None)
        elif way < 0.16:
            place[rng.choice(["extra", "", "\ud800", f"{name}\0"])] = self._leaf()
        elif isinstance(place.get(name), bytes) and way < 0.6:
            place[name] = self._array(name, place[name])
        elif name == "lanes" and way < 0.6 and isinstance(place.get(name), list):
            place[name] = list(place[name]) * rng.choice((2, 50))
        elif isinstance(place.get(name), (int, float)) and way < 0.7:
            place[name] = rng.choice(NUMBERS)
        elif isinstance(place.get(name), str) and way < 0.7:
            place[name] = rng.choice(TEXTS)
        else:
            place[name] = self._leaf()

    def _array(self, name: str, raw: bytes) -> bytes:
        """Arrays of other lengths, and times at the ends of what an int64 holds."""
        rng = self._rng
        if name == "times" and rng.random() < 0.7:
            times = [rng.choice(TIMES) for _ in range(len(raw) // 8)]
            return struct.pack(f"<{len(times)}q", *(sorted(times) if rng.random() < 0.8 else times))
        most = 300 if len(raw) < LONG else 2
        return rng.choice([raw[:-1], raw + b"\0", raw * 2, raw * most, b"", rng.choice(BYTES)])

    def _leaf(self) -> Any:
        rng = self._rng
        ways: list[Callable[[], Any]] = [
            lambda: rng.choice(NUMBERS),
            lambda: rng.choice(TEXTS),
            lambda: rng.choice(BYTES),
            lambda: rng.choice([None, True, False, [], {}, [[]], {"v": 1}, {1: 2}, {b"k": None}, [1, 2, 3]]),
            lambda: msgpack.ExtType(rng.randrange(128), b"\xff" * rng.choice((0, 1, 12))),
            lambda: msgpack.Timestamp(rng.choice([0, (1 << 34) - 1, I64_MIN]), 999_999_999),
            lambda: _Raw(self._nested() + b"\x01"),
        ]
        return rng.choice(ways)()

    def _nested(self) -> bytes:
        rng = self._rng
        one = rng.choice([b"\x91", b"\x81\xa1a", b"\x81\x01"])
        return one * rng.choice((2, 100, 400, 511, 512, 1500))


class _Raw(bytes):
    """Bytes that are MessagePack already."""


def _pack(plain: Any) -> bytes:
    """Like msgpack, which cannot nest deeply, nor write a text that is no UTF-8; hostile senders can do both."""
    if isinstance(plain, _Raw):
        return bytes(plain)
    packer = msgpack.Packer(unicode_errors="surrogatepass")
    if isinstance(plain, dict):
        parts = [_pack(each) for pair in plain.items() for each in pair]
        return bytes(packer.pack_map_header(len(plain)) + b"".join(parts))
    if isinstance(plain, (list, tuple)):
        return bytes(packer.pack_array_header(len(plain)) + b"".join(_pack(each) for each in plain))
    return bytes(packer.pack(plain))
