"""Each format is recognised and read to the same interactions; columns are found or mapped."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from relaygr_stream.errors import InputError
from relaygr_stream.workload.columns import ColumnMap
from relaygr_stream.workload.logs import read_log
from tests.unit.workload.logs_for_tests import Interaction, interactions, movielens_rows, write_udata

Rows = list[list[int]]


def expected(rows: Rows) -> set[Interaction]:
    return {Interaction(str(user), item, rating, time * 1000) for user, item, rating, time in rows}


def _dat(path: Path, rows: Rows) -> None:
    path.write_text("".join("::".join(map(str, row)) + "\n" for row in rows))


def _csv_movielens(path: Path, rows: Rows) -> None:
    path.write_text("userId,movieId,rating,timestamp\r\n" + "".join(",".join(map(str, row)) + "\r\n" for row in rows))


def _csv_bare(path: Path, rows: Rows) -> None:
    path.write_text("".join(";".join(map(str, row)) + "\n" for row in rows))


def _csv_iso(path: Path, rows: Rows) -> None:
    lines = ["time|user_id|event|sku"]
    for user, item, rating, time in rows:
        lines.append(f'{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC|"{user}"|{rating}|{item}')
    path.write_text("\n".join(lines))


def _jsonl(path: Path, rows: Rows) -> None:
    names = ("user_id", "item_id", "rating", "timestamp")
    path.write_text("\n".join(json.dumps({"x": [1], **dict(zip(names, row, strict=True))}) for row in rows))


def _jsonl_ms(path: Path, rows: Rows) -> None:
    path.write_text(
        "\n".join(json.dumps({"uid": str(u), "item": i, "action": float(r), "ts": t * 1000}) for u, i, r, t in rows)
    )


def _parquet(path: Path, rows: Rows) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    users, items, ratings, times = zip(*rows, strict=True)
    stamps = arrow.array([time * 1_000_000_000 for time in times], arrow.timestamp("ns", tz="UTC"))
    table = arrow.table({"userId": users, "movieId": items, "rating": [float(r) for r in ratings], "timestamp": stamps})
    parquet.write_table(table, path)


WRITERS: list[tuple[str, str, Callable[[Path, Rows], object]]] = [
    ("u.data", "u.data", write_udata),
    ("ratings.dat", "ratings.dat", _dat),
    ("ratings.csv", "csv", _csv_movielens),
    ("bare.csv", "csv", _csv_bare),
    ("shop.csv", "csv", _csv_iso),
    ("events.jsonl", "jsonl", _jsonl),
    ("events.ndjson", "jsonl", _jsonl_ms),
    ("events.parquet", "parquet", _parquet),
]


@pytest.mark.parametrize("renamed", [False, True], ids=["as it comes", "renamed"])
@pytest.mark.parametrize(("name", "kind", "write"), WRITERS, ids=[name for name, _, _ in WRITERS])
def test_every_format_gives_the_same_interactions(
    tmp_path: Path, name: str, kind: str, write: Callable[[Path, Rows], object], renamed: bool
) -> None:
    rows = movielens_rows(users=30)
    path = tmp_path / ("anything.bin" if renamed else name)
    write(path, rows)
    log = read_log(path)
    assert log.format == kind
    assert set(interactions(log)) == expected(rows)
    assert len(log) == len(rows)
    assert log.broken_count == 0


@pytest.mark.parametrize("writer", [write_udata, _csv_movielens, _jsonl])
def test_gzip(tmp_path: Path, writer: Callable[[Path, Rows], object]) -> None:
    plain, zipped = tmp_path / "plain", tmp_path / "zipped"
    rows = movielens_rows(users=5)
    writer(plain, rows)
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(interactions(read_log(zipped))) == list(interactions(read_log(plain)))


def test_sorted_by_time_within_a_user_ties_as_in_the_file(tmp_path: Path) -> None:
    path = write_udata(tmp_path / "u.data", [[2, 9, 1, 50], [1, 5, 1, 30], [1, 7, 1, 20], [1, 6, 1, 20], [2, 8, 1, 50]])
    log = read_log(path)
    assert [(row.user, row.item) for row in interactions(log)] == [("2", 9), ("2", 8), ("1", 7), ("1", 6), ("1", 5)]
    assert log.offsets.tolist() == [0, 2, 5]


def test_mapping_by_name_and_by_number(tmp_path: Path) -> None:
    named = tmp_path / "named.csv"
    named.write_text(
        "when,what,who,how,junk\n1700000000,a-1,ann,buy,x\n1700000001,b-2,bob,view,y\n1700000002,a-1,bob,buy,z\n"
    )
    log = read_log(named, columns=ColumnMap.parse("user=who, item=what, action=how, time=when"))
    assert list(interactions(log)) == [
        Interaction("ann", 1, 1, 1_700_000_000_000),
        Interaction("bob", 2, 2, 1_700_000_001_000),
        Interaction("bob", 1, 1, 1_700_000_002_000),
    ]
    assert log.item_names == ("a-1", "b-2")
    assert log.action_names == ("buy", "view")
    by_number = ColumnMap.parse("user=3,item=2,action=4,time=1")
    assert list(interactions(read_log(named, columns=by_number))) == list(interactions(log))
    bare = tmp_path / "bare.csv"
    bare.write_text("\n".join(named.read_text().splitlines()[1:]))
    assert list(interactions(read_log(bare, columns=by_number))) == list(interactions(log))


def test_a_mapping_reads_udata_like_files_as_text_columns(tmp_path: Path) -> None:
    path = write_udata(tmp_path / "log.tsv", [[100, 7, 1, 900], [101, 8, 1, 900]])
    log = read_log(path, columns=ColumnMap.parse("user=2,item=1,time=4"))
    assert [(row.user, row.item, row.action) for row in interactions(log)] == [("7", 100, 0), ("8", 101, 0)]


def test_half_stars_double_every_rating_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ratings.csv"
    path.write_text("userId,movieId,rating,timestamp\n1,10,4.0,100\n1,11,0.5,101\n1,12,5.0,102\n")
    assert [row.action for row in interactions(read_log(path))] == [8, 1, 10]
    path.write_text("userId,movieId,rating,timestamp\n1,10,4.0,100\n1,12,5.0,102\n")
    assert [row.action for row in interactions(read_log(path))] == [4, 5]


@pytest.mark.parametrize(
    ("times", "unit", "milliseconds"),
    [
        ("1700000000", "auto", 1_700_000_000_000),
        ("1700000000.25", "auto", 1_700_000_000_250),
        ("1700000000123", "auto", 1_700_000_000_123),
        ("1700000000123", "ms", 1_700_000_000_123),
        ("5000", "ms", 5000),
        ("2023-11-14T22:13:20Z", "auto", 1_700_000_000_000),
        ("2023-11-14T23:13:20+01:00", "iso", 1_700_000_000_000),
        ("2023-11-14", "auto", 1_699_920_000_000),
    ],
)
def test_time_units(tmp_path: Path, times: str, unit: str, milliseconds: int) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f"user,item,time\nann,1,{times}\n")
    assert [row.time_ms for row in interactions(read_log(path, time_unit=unit))] == [milliseconds]  # type: ignore[arg-type]


def test_item_ids_can_be_numbered_anew(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("user,item,time\nann,900000,1\nann,5,2\nann,900000,3\n")
    assert [row.item for row in interactions(read_log(path))] == [900000, 5, 900000]
    assert [row.item for row in interactions(read_log(path, item_ids="name"))] == [1, 2, 1]


@pytest.mark.parametrize(
    "text", ["user=a,item=b", "user=a,item=b,time=", "user=a,user=b,item=c,time=d", "x=1", "who", ""]
)
def test_bad_mappings_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="columns"):
        ColumnMap.parse(text)


def test_a_missing_column_names_those_that_exist(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("who,what,time\nann,1,5\n")
    with pytest.raises(InputError, match="no user, item and time among the columns `who`, `what`, `time`"):
        read_log(path)
    with pytest.raises(InputError, match="no column `uid` for user; there are `who`"):
        read_log(path, columns=ColumnMap.parse("user=uid,item=what,time=time"))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.parquet"
    _parquet(path, movielens_rows(users=1))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InputError, match="extra `parquet`"):
        read_log(path)


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = write_udata(tmp_path / "u.data", movielens_rows(users=2000))  # more lines than lie between two calls
    read_log(path, progress=lambda done, total: seen.append((done, total)))
    size = path.stat().st_size
    assert len(seen) >= 2
    assert seen[-1] == (size, size)
    assert 0 < seen[0][0] <= size
