from __future__ import annotations

import gzip
import json
import lzma
import os
from dataclasses import replace
from pathlib import Path

import pytest

from examples.movielens.data import DataError, Histories, check_same_rows, read_histories
from relaygr_stream.models.item_ids import ITEMS_FILE
from relaygr_stream.models.loading import save_checkpoint
from relaygr_stream.workload import logfile
from relaygr_stream.workload.logs import read_log
from tests.unit.models.small_models import small_model

U_DATA = "1\t20\t5\t40\n1\t10\t3\t10\n1\t30\t4\t20\n1\t10\t1\t30\n"


def written(folder: Path, text: str, name: str = "data") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def names_of(data: Histories) -> list[str]:
    return [data.names[item] for item in data.users[0].items]


def test_u_data_is_read_in_the_order_of_time_with_ratings_as_actions(tmp_path: Path) -> None:
    data = read_histories(written(tmp_path, U_DATA))
    (user,) = data.users
    assert names_of(data) == ["10", "30", "10", "20"]
    assert user.actions.tolist() == [3, 4, 1, 5]
    assert user.times.tolist() == [10_000, 20_000, 30_000, 40_000]
    assert user.gaps().tolist() == [0, 10_000, 10_000, 10_000]
    assert data.has_times


def test_ratings_dat_reads_as_u_data(tmp_path: Path) -> None:
    data = read_histories(written(tmp_path, U_DATA.replace("\t", "::")))
    assert names_of(data) == ["10", "30", "10", "20"]
    assert data.users[0].actions.tolist() == [3, 4, 1, 5]


@pytest.mark.parametrize("stars", [(0.5, 1.5, 2.5, 3.5, 4.5, 5.0), (1, 2, 3, 4, 5, 5)])
@pytest.mark.parametrize("kind", ["ratings.csv", "ratings.dat"])
def test_ratings_are_the_same_action_rows_in_training_and_serving(
    tmp_path: Path, stars: tuple[float, ...], kind: str
) -> None:
    rows = [(1, 10 + k, rating, 1_400_000_000 + 60 * k) for k, rating in enumerate(stars)]
    sign, head = (",", "userId,movieId,rating,timestamp\n") if kind.endswith("csv") else ("::", "")
    file = written(tmp_path, head + "".join(sign.join(map(str, row)) + "\n" for row in rows), kind)
    assert read_histories(file).users[0].actions.tolist() == read_log(file).actions.tolist()
    assert len(set(read_log(file).actions.tolist())) == len(set(stars))


def test_ids_with_leading_zeros_are_items_of_their_own_in_one_order(tmp_path: Path) -> None:
    lines = [f"1\t{item}\t5\t{at}\n" for at, item in enumerate(["07", "7", "007", "10", "9"])]
    assert read_histories(written(tmp_path, "".join(lines))).names == ["7", "07", "007", "9", "10"]


def test_a_long_field_is_one_error_with_its_line(tmp_path: Path) -> None:
    rows = [f"u,{k},{'x' * (2_000_000 if k == 3 else 5)},{1_400_000_000 + k}" for k in range(6)]
    with pytest.raises(DataError, match="line 5"):
        read_histories(written(tmp_path, "\n".join(["user,item,text,time", *rows])))


def test_microseconds_are_read_as_such(tmp_path: Path) -> None:
    text = "user,item,time\n" + "".join(f"u,{k},{1_400_000_000_000_000 + k * 1_000_000}\n" for k in range(5))
    assert read_histories(written(tmp_path, text)).users[0].times[0] == 1_400_000_000_000


def test_lines_of_user_and_item_keep_their_order_and_have_no_times(tmp_path: Path) -> None:
    data = read_histories(written(tmp_path, "1 9\n1 7\n2 9\n1 8\n1 9\n"))
    assert names_of(data) == ["9", "7", "8", "9"]
    assert not data.users[0].gaps().any()
    assert not data.has_times
    assert data.names == ["7", "8", "9"]  # numbers in the order of numbers


def test_behaviours_of_equal_time_keep_the_files_order(tmp_path: Path) -> None:
    data = read_histories(written(tmp_path, "".join(f"1\t{item}\t5\t7\n" for item in (4, 2, 3, 1))))
    assert names_of(data) == ["4", "2", "3", "1"]


@pytest.mark.parametrize(
    "times", [(1, 2, 3, 4), (1_600_000_000_000, 1_600_000_001_000, 1_600_000_002_000, 1_600_000_003_000)]
)
def test_a_csv_may_have_its_columns_in_any_order_and_seconds_or_milliseconds(
    tmp_path: Path, times: tuple[int, ...]
) -> None:
    lines = [f"x,{time},item-{number},u" for number, time in enumerate(times)]
    data = read_histories(written(tmp_path, "\n".join(["note,Timestamp,item_id,user", *reversed(lines)])))
    assert names_of(data) == ["item-0", "item-1", "item-2", "item-3"]
    assert data.users[0].gaps().tolist() == [0, 1000, 1000, 1000]


def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path: Path) -> None:
    text = "\ufeffuser,item,time\n" + "".join(f"u,{item},{item}\n" for item in range(1, 5))
    (tmp_path / "data.csv.gz").write_bytes(gzip.compress(text.encode()))
    for file in (written(tmp_path, text), tmp_path / "data.csv.gz"):
        assert names_of(read_histories(file)) == ["1", "2", "3", "4"]


def test_packed_files_are_read_as_plain_ones(tmp_path: Path) -> None:
    (tmp_path / "data.gz").write_bytes(gzip.compress(U_DATA.encode()))
    (tmp_path / "data.xz").write_bytes(lzma.compress(U_DATA.encode()))
    for name in ("data.gz", "data.xz"):
        assert names_of(read_histories(tmp_path / name)) == ["10", "30", "10", "20"]


def test_users_with_too_few_behaviours_and_their_items_are_left_out(tmp_path: Path) -> None:
    data = read_histories(written(tmp_path, "1 1\n1 2\n1 3\n1 4\n2 5\n2 6\n"))
    assert [user.user for user in data.users] == ["1"]
    assert data.names == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("1 2\n1 3\n", "no user has 4 behaviours"),
        ("1 2 3\n", "not recognised as any of u.data, ratings.dat, csv"),
        ("1 2\n1 2 3\n", "line 2: found '1 2 3', expected user item"),
        (U_DATA + "1\t2\tfive\t50\n", "line 5: action 'five' is not a number"),
        (U_DATA + "1\t2\t5\n", "line 5: 3 fields between tabs"),
        ("1::2::3\n", "not recognised"),
        ("user,thing,time\n1,2,3\n", "no user, item and time among the columns"),
        ("user,item,time\n1,2,3\n1,2,soon\n", "line 3: time 'soon' is not a number"),
        ("user,item,time\n1,2,-5\n", "time '-5' is out of range"),
        ("user,item,time\n1,2,nan\n", "no usable line"),
    ],
)
def test_bad_lines_are_named_with_what_is_expected(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        read_histories(written(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("absent", None, "no such file"),
        ("bytes", b"\xff\xfe\x00", "UTF-16"),
        ("broken.xz", lzma.compress(U_DATA.encode())[:-20], "damaged or cut off|cannot be unpacked"),
        ("broken.gz", b"no gzip at all", "not recognised"),
        ("bomb.gz", gzip.compress(b"1 2\n" * 500_000), "unpack to more than"),
        ("bomb.csv.xz", lzma.compress(b"user,item,time\n" + b"u,1,1400000000\n" * 100_000), "unpack to more than"),
        ("years.csv", b"user,item,time\n" + b"u,1,44197\n" * 9, "no plausible dates"),
        ("sorted.csv", b"user,item,time\n" + b"u,1,1400000000\n" * 30 + b"u,2\n" * 30, "30 of 60 lines cannot be read"),
    ],
)
def test_a_file_that_is_no_log_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes | None, said: str
) -> None:
    monkeypatch.setattr(logfile, "FREE_UNPACKED_BYTES", 1 << 16)
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=said):
        read_histories(tmp_path / name)


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for file in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(DataError, match="no regular file"):
            read_histories(file)


def test_a_file_is_read_by_training_as_by_serving(tmp_path: Path) -> None:
    lines = [f'{{"user": "u", "item": "i{at % 3}", "event": "{("view", "buy")[at % 2]}", "ts": {1_400_000_000 + at}}}\n'
             for at in range(6)]  # fmt: skip
    file = written(tmp_path, "".join(lines), "events.jsonl")
    data, log = read_histories(file), read_log(file)
    assert data.actions == ("", "view", "buy")
    assert data.users[0].actions.tolist() == log.actions.tolist()
    assert names_of(data) == [log.item_names[item - 1] for item in log.items.tolist()]
    assert data.users[0].times.tolist() == log.times.tolist()


def test_actions_are_named_as_the_file_has_them_where_training_has_them(tmp_path: Path) -> None:
    half = "user,item,rating,time\n" + "".join(f"u,{k},{k / 2},{1_400_000_000 + k}\n" for k in (1, 2, 4, 5))
    assert read_histories(written(tmp_path, half)).actions == ("", "0.5", "1", "", "2", "2.5")
    short = half + "v,1,9,1400000000\n"  # of a user who is left out
    assert read_histories(written(tmp_path, short)).actions == ("", "0.5", "1", "", "2", "2.5")
    assert read_histories(written(tmp_path, "1 1\n1 2\n1 3\n1 4\n")).actions == ("",)


def test_a_checkpoint_of_another_file_is_not_evaluated_on_this_one(tmp_path: Path) -> None:
    data = read_histories(written(tmp_path, U_DATA))
    save_checkpoint(small_model(vocab=3, actions=data.actions), tmp_path / "ck")
    (tmp_path / "ck" / ITEMS_FILE).write_text(json.dumps(data.names))
    check_same_rows(tmp_path / "ck", data)
    with pytest.raises(DataError, match=r"its 3 items .* are not the 3 of this one"):
        check_same_rows(tmp_path / "ck", replace(data, names=["10", "30", "20"]))
    with pytest.raises(DataError, match="trained with the actions '1', '3', '4', '5', this file has '1', '5'"):
        check_same_rows(tmp_path / "ck", replace(data, actions=("", "1", "5")))
