"""Every reader of arrivals on small made-up files; what is wrong with a file is one error that says where."""

from __future__ import annotations

import gzip
import json
import lzma
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.errors import InputError
from relaygr_stream.workload.arrivals import ArrivalLog, read_arrivals, spread
from tests.unit.workload.logs_for_tests import movielens_rows, write_udata


def prompts(path: Path, count: int, shared: int = 1, seed: int = 1) -> Path:
    """A trace of prompts: all share the first blocks; about a third come from someone who was there before."""
    rng = random.Random(seed)
    at, lines, users = 0, [], 0
    for _ in range(count):
        at += rng.choice([0, 7, 300, 900])
        if users == 0 or rng.random() < 0.65:
            user, users = users, users + 1
        else:
            user = rng.randrange(users)
        ids = [*range(shared), 1000 + user, *(rng.randrange(10**6) for _ in range(rng.randrange(4)))]
        lines.append(json.dumps({"timestamp": at, "input_length": 512 * len(ids), "hash_ids": ids}))
    path.write_text("\n".join(lines) + "\n")
    return path


def azure(path: Path, times: list[str]) -> Path:
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{time},374,44\n" for time in times))
    return path


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_the_users_of_a_trace_are_the_first_blocks_that_differ(tmp_path: Path, shared: int) -> None:
    path = prompts(tmp_path / "t.jsonl", 300, shared)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    log = read_arrivals(path)
    stamps = [record["timestamp"] / 1e3 for record in records]
    assert (np.diff(log.times) > 0).all()
    assert all(0 <= at - stamp < 0.007 for at, stamp in zip(log.times, stamps, strict=True))  # the least step
    names = [record["hash_ids"][shared] for record in records]
    assert log.users is not None
    assert [names.index(name) for name in names] == [log.users.tolist().index(user) for user in log.users]
    assert log.user_count == len(set(names))
    assert log.returns == pytest.approx(1 - len(set(names)) / 300)
    assert "300 arrivals in " in log.describe() and f" min, {len(set(names))} users" in log.describe()


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("xz", lzma.compress)])
def test_a_log_may_be_compressed(tmp_path: Path, ending: str, pack: object) -> None:
    path = prompts(tmp_path / "t.jsonl", 50)
    packed = tmp_path / f"t.jsonl.{ending}"
    packed.write_bytes(pack(path.read_bytes()))  # type: ignore[operator]
    assert read_arrivals(packed).times.tolist() == read_arrivals(path).times.tolist()
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"compressed data is damaged or cut off|cannot be unpacked"):
        read_arrivals(packed)


def test_a_table_of_times_has_no_users(tmp_path: Path) -> None:
    times = ["2023-11-16 18:15:46.6805900", "2023-11-16 18:15:50.9951690", "2023-11-16 18:15:48.0000000"]
    log = read_arrivals(azure(tmp_path / "a.csv", times))
    assert log.users is None and log.returns == 0
    assert np.diff(log.times).tolist() == pytest.approx([1.32, 2.995], abs=2e-3)
    seconds = tmp_path / "s.tsv"
    seconds.write_text("user\ttime\n" + "a\t10.5\nb\t11\na\t13\n")
    log = read_arrivals(seconds)
    assert log.times.tolist() == [10.5, 11.0, 13.0]
    assert log.users is not None and log.users.tolist() == [0, 1, 0]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "TIMESTAMP,Tokens\n10.5,3\n11,3\n"),
        ("a.csv", '"TIMESTAMP","Tokens, in"\n10.5,3\n11,3\n'),
        ("t.jsonl", '{"timestamp": 10500, "hash_ids": [0]}\n{"timestamp": 11000, "hash_ids": [1]}\n'),
    ],
)
def test_a_byte_order_mark_and_quoted_names_are_no_part_of_the_names(
    tmp_path: Path, name: str, text: str, mark: str
) -> None:
    path = tmp_path / name
    path.write_text(mark + text, encoding="utf-8")
    assert read_arrivals(path).times.tolist() == [10.5, 11.0]


def test_an_interaction_log_gives_its_times_and_users(tmp_path: Path) -> None:
    rows = movielens_rows(users=20)
    log = read_arrivals(write_udata(tmp_path / "u.data", rows))
    stamps = np.sort(np.array([row[3] for row in rows], np.float64))
    assert ((log.times >= stamps) & (log.times < stamps + np.diff(np.unique(stamps)).min())).all()
    assert log.user_count == 20 and len(log.times) == len(rows)
    table = tmp_path / "shop.csv"
    table.write_text("user_id,item_id,time\n" + "".join(f"u{row[0]},{row[1]},{row[3]}\n" for row in rows))
    assert read_arrivals(table).times.tolist() == log.times.tolist()
    table.write_text(table.read_text() + "one,two\n")
    assert "1 broken lines skipped" in read_arrivals(table).describe()


GOOD = '{"timestamp": 0, "hash_ids": [0, 1]}\n'


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.jsonl", GOOD + '{"timestamp": 5, "hash_ids": [0', ":2: not JSON"),
        ("t.jsonl", GOOD + "[]\n", ":2: `timestamp` is 'None'"),
        ("t.jsonl", GOOD + '{"timestamp": "soon", "hash_ids": [0]}\n', ":2: `timestamp` is 'soon'"),
        ("t.jsonl", GOOD + '{"timestamp": -1, "hash_ids": [0]}\n', ":2: `timestamp` is '-1'"),
        ("t.jsonl", GOOD + f'{{"timestamp": {"9" * 400}, "hash_ids": [0]}}\n', ":2: `timestamp` is '9999"),
        ("t.jsonl", GOOD + '\n{"timestamp": 1, "hash_ids": []}\n', ":3: `hash_ids` is '[]'"),
        ("t.jsonl", GOOD + '{"timestamp": 1, "hash_ids": [[2]]}\n', ":2: `hash_ids` is '[[2]]'"),
        ("t.jsonl", GOOD + GOOD, "2 arrivals within 0 s have no rate"),
        ("t.jsonl", GOOD, "1 arrivals within 0 s have no rate"),
        ("a.csv", "TIMESTAMP,Tokens\n2023-11-16 18:15:46,3\nlater,3\n", ":3: column `TIMESTAMP`: time 'later'"),
        ("a.csv", "TIMESTAMP,Tokens\n2023-11-16 18:15:46,3\n1\n", ":3: 1 columns, and the header has 2"),
        ("a.csv", 'TIMESTAMP,Tokens\n5,"3\n', ":2: bad quotes"),
        ("a.csv", "TIMESTAMP,Tokens\n-5,3\n", ":2: column `TIMESTAMP`: time '-5' is negative"),
        ("a.csv", "TIMESTAMP,Tokens\n", "0 arrivals within 0 s have no rate"),
        ("a.txt", "1 1\n1 2\n", "not recognised"),
        ("a.csv", "", "is empty"),
        ("a.csv", "a\0b", "is a binary file"),
    ],
)
def test_a_bad_file_is_one_error_that_says_what_was_expected(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_arrivals(path)
    message = str(caught.value)
    assert words in message and str(path) in message and "\n" not in message
    assert "expected" in message


@given(st.lists(st.integers(0, 20), min_size=2).filter(lambda times: len(set(times)) > 1))
def test_equal_times_are_spread_over_the_tick(times: list[int]) -> None:
    given = np.sort(np.array(times, np.float64))
    tick = np.diff(np.unique(given)).min()
    found = spread(given)
    assert (np.diff(found) > 0).all()
    assert ((found >= given) & (found < given + tick)).all()
    for time in set(times):
        group = found[given == time]
        assert group - time == pytest.approx(tick * np.arange(len(group)) / len(group))


@given(st.lists(st.integers(0, 10**6), min_size=2).filter(lambda times: len(set(times)) > 1))
def test_gaps_are_those_of_the_log_with_mean_one(times: list[int]) -> None:
    log = ArrivalLog("x", np.sort(np.array(times, np.float64)), None)
    assert log.gaps.mean() == pytest.approx(1.0)
    assert (log.gaps >= 0).all()
    assert log.gaps[1:] * np.diff(log.times).mean() == pytest.approx(np.diff(log.times))
