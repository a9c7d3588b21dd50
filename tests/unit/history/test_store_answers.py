"""What a user's own store may answer: every field of another type is HistoryUnavailable, and names the field."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from relaygr_stream.errors import HistoryUnavailable
from relaygr_stream.history.store import looked_up, rows_of
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.history import HistoryReference

DIGEST = b"d" * 16
REFERENCE = HistoryReference(length=2, digest=DIGEST)


class Store:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    async def reference(self, user_id: str, tenant: str = "") -> Any:
        return self.answer

    async def read(self, user_id: str, tenant: str, version: int, start: int, stop: int) -> Any:
        return self.answer

    async def close(self) -> None:
        pass


def rows(columns: object = msgspec.UNSET, items: object = b"\1\0\0\0" * 2) -> Behaviours:
    return Behaviours(items, b"\1\1", bytes(16), columns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "answer",
    [
        rows({1: b"xx", "a": b"xx"}), rows({b"a": b"xx"}), rows({None: b"xx"}), rows({"\ud800": b"xx"}),
        rows({"": b"xx"}), rows({"a" * 5000: b"xx"}), rows({f"a{n}": b"" for n in range(2000)}), rows({"a": "xx"}),
        rows({"a": None}), rows([b"xx"]), rows(None), rows(items=[1, 2]), rows(items=None), None, b"", {}, (b"", b""),
    ],
)  # fmt: skip
def test_rows_of_another_type(answer: object) -> None:
    with pytest.raises(HistoryUnavailable, match="the history store answers with"):
        asyncio.run(rows_of(Store(answer), "u", "", REFERENCE, 0, 1.0))


@pytest.mark.parametrize(
    "fields",
    [{"length": "2"}, {"length": -1}, {"length": None}, {"digest": "d" * 16}, {"digest": b"d"}, {"version": -1},
     {"version": 0.5}, {"positions": None}, {"positions": "x"}],
)  # fmt: skip
def test_a_reference_of_another_type(fields: dict[str, Any]) -> None:
    answer = HistoryReference(**{"length": 2, "digest": DIGEST, **fields})
    with pytest.raises(HistoryUnavailable, match=f"no valid HistoryReference: .*{next(iter(fields))}"):
        asyncio.run(looked_up(Store(answer), "u", "", 1.0))


def test_what_is_well_formed_passes() -> None:
    for answer in (rows({"price:float32": b"12345678"}), rows(), Behaviours()):
        assert asyncio.run(rows_of(Store(answer), "u", "", REFERENCE, 0, 1.0)) is answer
    assert asyncio.run(looked_up(Store(REFERENCE), "u", "", 1.0)) is REFERENCE
    assert asyncio.run(looked_up(Store(None), "u", "", 1.0)) is None
