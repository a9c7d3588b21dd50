"""What a column means is found from the whole file: ids with leading zeros, files sorted by item, units of time."""

from __future__ import annotations

import gzip
import lzma
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from relaygr_stream.errors import InputError
from relaygr_stream.workload import logfile
from relaygr_stream.workload.logs import read_log
from relaygr_stream.workload.replay import Replay, ReplayOptions
from tests.unit.workload.logs_for_tests import interactions

AT = 1_400_327_202  # seconds; 2014-05-17


def log_of(tmp_path: Path, rows: Sequence[tuple[object, ...]], name: str = "log.csv") -> Path:
    path = tmp_path / name
    path.write_text("user,item,time\n" + "".join(",".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
    return path


# ---- ids ----


def test_leading_zeros_make_three_items(tmp_path: Path) -> None:
    log = read_log(log_of(tmp_path, [("u", item, AT) for item in ("7", "07", "007", "7")]))
    assert log.item_names == ("7", "07", "007")
    assert [row.item for row in interactions(log)] == [1, 2, 3, 1]


@pytest.mark.parametrize("place", [0, 999])
def test_one_id_with_a_leading_zero_anywhere_makes_the_column_names(tmp_path: Path, place: int) -> None:
    rows: list[tuple[object, ...]] = [("u", item + 1, AT) for item in range(1000)]
    rows[place] = ("u", "0042", AT)
    log = read_log(log_of(tmp_path, rows))
    assert log.broken_count == 0
    assert len(log.item_names) == 1000


def test_movielens_files_keep_leading_zeros_too(tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_text("".join(f"1::{item}::4::{AT}\n" for item in ("7", "07")))
    assert read_log(tmp_path / "ratings.dat").item_names == ("7", "07")


@pytest.mark.parametrize("late", ["B000000001", "99999999999999999999"])
def test_a_file_sorted_by_item_is_read_whole(tmp_path: Path, late: str) -> None:
    log = read_log(log_of(tmp_path, [("u", item + 1, AT) for item in range(250)] + [("v", late, AT)] * 350))
    assert (len(log), log.broken_count) == (600, 0)
    assert log.item_names[-1] == late


@pytest.mark.parametrize("broken", [6, 61, 300])
def test_a_file_of_which_more_than_a_tenth_is_broken_is_an_error(tmp_path: Path, broken: int) -> None:
    rows: list[tuple[object, ...]] = [("u", 5, AT)] * (9 * broken - 1) + [("u", 5)] * broken
    with pytest.raises(
        InputError, match=rf"{broken} of {10 * broken - 1} lines cannot be read.*at most 10%.*--columns"
    ):
        read_log(log_of(tmp_path, rows))
    log = read_log(log_of(tmp_path, [("u", 5, AT), *rows]))
    assert log.broken_count == broken


def test_what_helps_is_named(tmp_path: Path) -> None:
    path = log_of(tmp_path, [("u", 5, AT)] * 30 + [("u", "B1", AT)] * 30)
    with pytest.raises(InputError, match=r"line 32: item 'B1' is not .*--item-ids name"):
        read_log(path, item_ids="number")


def test_rows_dropped_at_the_end_leave_no_user_without_interactions(tmp_path: Path) -> None:
    log = read_log(log_of(tmp_path, [("a", 1, AT), ("lost", "x", AT)] + [("b", 2, AT)] * 20))
    assert log.users == ("a", "b")
    assert log.offsets.tolist() == [0, 1, 21]
    assert [line.line for line in log.broken] == [3]


# ---- times ----


@pytest.mark.parametrize(
    ("time", "unit"),
    [
        (AT, "s"),
        (AT * 1000, "ms"),
        (AT * 1_000_000, "us"),
        (AT * 1_000_000_000, "ns"),
        (f"{AT}.0", "s"),
        ("1.400327202e15", "us"),
        (AT // 86_400, "days"),
        (20140517, "iso"),
        ("2014-05-17", "iso"),
    ],
)
def test_the_unit_is_found_and_said(tmp_path: Path, time: object, unit: str) -> None:
    log = read_log(log_of(tmp_path, [("u", 1, time), ("u", 2, time)]))
    assert log.time_unit == unit
    assert str(log.times.astype("datetime64[ms]")[0]).startswith("2014-05-17")
    words = {"us": "microseconds", "days": "days since 1970"}.get(unit, "")
    assert words in log.facts()
    assert "2014-05-17" in Replay(log, ReplayOptions(min_history=1, suffix=0)).describe()


@pytest.mark.parametrize("time", [44_197, 1_000_000, 637_000_000_000_000_000, 20_140_517_123_000, 10**22])
def test_times_of_no_plausible_year_are_an_error_that_names_the_option(tmp_path: Path, time: int) -> None:
    with pytest.raises(InputError, match=rf"times such as '{time}' are no plausible dates.*--time-unit"):
        read_log(log_of(tmp_path, [("u", 1, time), ("u", 2, time)]))


def test_a_stated_unit_is_held_to_plausible_years(tmp_path: Path) -> None:
    path = log_of(tmp_path, [("u", 1, AT * 1_000_000)] * 20)
    with pytest.raises(InputError, match=r"no usable line.*in milliseconds, the year \d+; another unit"):
        read_log(path, time_unit="ms")
    assert read_log(log_of(tmp_path, [("u", 1, 1_000_000)]), time_unit="s").times.tolist() == [10**9]


def test_a_time_of_another_unit_is_a_broken_line(tmp_path: Path) -> None:
    log = read_log(log_of(tmp_path, [("u", 1, AT * 1000)] * 20 + [("u", 1, AT), ("u", 1, AT * 10**6)]))
    assert (len(log), log.broken_count) == (20, 2)
    assert "1970" in log.broken[0].reason


@pytest.mark.parametrize(("time", "odd"), [(AT, "nan"), (AT, "9" * 50), ("2014-05-17", "soon"), (AT, "2014-05-17")])
def test_a_time_that_is_none_does_not_decide_the_unit_of_a_short_file(tmp_path: Path, time: object, odd: str) -> None:
    log = read_log(log_of(tmp_path, [("u", 1, time), ("u", 2, odd), ("u", 3, time)]))
    assert (len(log), log.broken_count) == (2, 1)
    assert log.time_unit == ("s" if time == AT else "iso")


def test_times_that_count_from_a_start_of_their_own_stay_so(tmp_path: Path) -> None:
    assert read_log(log_of(tmp_path, [("u", 1, 1), ("u", 2, 2)])).times.tolist() == [1000, 2000]


def test_repeated_events_are_counted_and_said(tmp_path: Path) -> None:
    log = read_log(log_of(tmp_path, [("u", 1, AT), ("u", 2, AT), ("u", 1, AT), ("v", 1, AT), ("u", 1, AT)]))
    assert (len(log), log.repeats) == (5, 2)
    assert "2 events are repeated" in log.facts()


# ---- files as weapons ----


@pytest.fixture
def little_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is always read of a file takes no time to write."""
    monkeypatch.setattr(logfile, "FREE_UNPACKED_BYTES", 1 << 16)


@pytest.mark.usefixtures("little_is_free")
@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
@pytest.mark.parametrize("line", [b"x\n", b"\n", b"1,2,1400327202\n", b"x"])
def test_a_small_file_does_not_keep_a_reader_busy(tmp_path: Path, pack: type[bytes], line: bytes) -> None:
    path = tmp_path / "log.csv.gz"
    path.write_bytes(pack(b"user,item,time\n1,2,1400327202\n" + line * (2_000_000 // len(line))))
    with pytest.raises(InputError, match=r"unpack to more than|lines cannot be read"):
        read_log(path)


@pytest.mark.usefixtures("little_is_free")
def test_a_parquet_file_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = 100_000
    table = arrow.table(
        {"user": arrow.repeat("u", rows), "item": arrow.repeat(1, rows), "time": arrow.repeat(AT, rows)}
    )
    parquet.write_table(table, tmp_path / "rows.parquet", compression="zstd")
    with pytest.raises(InputError, match="unpack to"):
        read_log(tmp_path / "rows.parquet")


def test_a_long_text_that_every_row_names_is_not_copied(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = 100_000
    users = arrow.DictionaryArray.from_arrays(arrow.repeat(arrow.scalar(0, arrow.int32()), rows), ["A" * 1_000_000])
    table = arrow.table({"user": users, "item": arrow.repeat(1, rows), "time": arrow.repeat(AT, rows)})
    parquet.write_table(table, tmp_path / "text.parquet", compression="zstd", store_schema=False)
    with pytest.raises(InputError, match="the user id has 1000000 characters"):  # 100 GB, copied
        read_log(tmp_path / "text.parquet")


@pytest.mark.parametrize("name", ["fifo", "zero", "pointer"])
def test_what_is_no_log_is_called_what_it_is(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "fifo":
        os.mkfifo(path)
    elif name == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(InputError, match="Git LFS pointer" if name == "pointer" else "no regular file"):
        read_log(path)


def test_a_long_quoted_field_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    text = "x" * 200_000
    path.write_text(f'user,item,text,time\nu,1,"{text}",{AT}\nu,2,"{text}, too",{AT}\n')
    assert len(read_log(path)) == 2


def test_lines_of_carriage_returns_alone_are_named(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(f"user,item,time\ru,1,{AT}\ru,2,{AT}\r".encode())
    with pytest.raises(InputError, match="carriage returns alone"):
        read_log(path)
