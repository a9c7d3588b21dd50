"""Broken lines are counted, located and skipped; unusable files are refused in words; nothing crashes."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relaygr_stream.errors import InputError
from relaygr_stream.workload.formats import FORMATS, Format
from relaygr_stream.workload.logfile import MAX_LINE_BYTES
from relaygr_stream.workload.logs import read_log
from tests.properties import examples
from tests.unit.workload.logs_for_tests import movielens_rows, write_udata

BROKEN_UDATA = {
    3: (b"196\t242\t3\n", "3 fields between tabs; expected user, item, rating, time"),
    5: (b"196\t242\t3\tyesterday\n", "time 'yesterday' is not a number of seconds"),
    8: (b"196\tabc\t3\t881250949\n", "item 'abc' is not an integer"),
    9: (b"196\t242\t\xff\t881250949\n", "not UTF-8"),
    12: (b"196\t242\t3.3\t881250949\n", "action '3.3' is not a number within"),
    15: (b"\t242\t3\t881250949\n", "the user id has 0 characters"),
    700: (b"garbage\n", "1 fields between tabs"),
}


def test_broken_lines_are_counted_located_and_skipped(tmp_path: Path) -> None:
    path = write_udata(tmp_path / "u.data", movielens_rows())
    lines = path.read_bytes().splitlines(keepends=True)
    for number, (line, _) in BROKEN_UDATA.items():
        lines.insert(number - 1, line)
    lines.insert(20, b"\n")  # a blank line is neither usable nor broken
    path.write_bytes(b"".join(lines))
    log = read_log(path)
    assert len(log) == len(movielens_rows())
    assert log.broken_count == len(BROKEN_UDATA)
    assert [line.line for line in log.broken] == [3, 5, 8, 9, 12]
    for broken in log.broken:
        assert BROKEN_UDATA[broken.line][1] in broken.reason
    assert log.lines == len(log) + log.broken_count + 1
    shown = log.broken_text().splitlines()
    assert shown[0].startswith(f"{path}:3: 3 fields")
    assert shown[-1] == f"{path}: 2 more broken lines skipped"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("ann,1", "2 columns; most of the first lines have 4"),
        ('ann,"1,view,5', "bad quotes"),
        ("ann,1,view,soon", "time 'soon' is not a number"),
        ("ann,1,view,-5", "time '-5' is out of range"),
        ("ann,-1,view,5", "item '-1' is not an integer"),
        ("ann,9223372036854775808,view,5", "item '9223372036854775808' is not an integer within 0…9223372036854775807"),
        ("ann,1,,5", "the action is empty"),
        ("u" * 257 + ",1,view,5", "the user id has 257 characters"),
        ("a" * MAX_LINE_BYTES + ",1,view,5", "longer than"),
    ],
)
def test_reasons_in_csv(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "log.csv"
    good = "".join(f"bob,{item},buy,{item}\n" for item in range(300))
    path.write_text(f"user,item,action,time\nbob,1,view,3\n{line}\n{good}")
    log = read_log(path)
    assert len(log) == 301
    assert [(broken.line, broken.reason[: len(reason)]) for broken in log.broken] == [(3, reason)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"user": "ann", "item": 1}', "no time: `time` is missing or null"),
        ('{"user": null, "item": 1, "time": 3}', "no user: `user` is missing or null"),
        ('{"user": "ann", "item": [1], "time": 3}', "item `item` is a list"),
        ('{"user": "ann", "item": 1, "time": true}', "time `time` is a bool"),
        ('{"user": "ann", ', "not JSON"),
        ("[1, 2]", "a JSON list; expected one object a line"),
        ("[" * 100_000, "not JSON"),
        ("5e999", "not JSON"),
    ],
)
def test_reasons_in_json_lines(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"user": "ann", "item": 1, "time": 3}}\n{line}\n{{"user": "ann", "item": 2, "time": 4}}\n' * 1)
    log = read_log(path)
    assert len(log) == 2
    assert [(broken.line, broken.reason[: len(reason)]) for broken in log.broken] == [(2, reason)]


def test_more_actions_than_fit_are_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("user,item,action,time\n" + "".join(f"ann,1,kind-{kind},5\n" for kind in range(260)))
    log = read_log(path)
    assert (len(log), log.broken_count) == (255, 5)
    assert log.broken[0].reason == "action 'kind-255' would be the 256th distinct one; 255 fit"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"\x7fELF\x00\x01\x02" * 50, "is a binary file (a zero byte at offset 4)"),
        ("user\titem".encode("utf-16"), "UTF-16"),
        (b"\x1f\x8b\x08garbage", "looks compressed (gzip or xz) but cannot be unpacked"),
        (b"PAR1 but not really", "cannot be read as Parquet"),
        (b"Dear diary\ntoday nothing\n", "not recognised as any of u.data, ratings.dat, csv, jsonl, parquet"),
        (b"Dear diary\n", "its first line is 'Dear diary'"),
        (b"1\t2\n" * 3, "not recognised"),
    ],
)
def test_unusable_files_are_refused_in_words(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_log(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_of_broken_lines_says_what_was_expected(tmp_path: Path) -> None:
    path = tmp_path / "u.data"
    path.write_text("a,b\nc,d\n")
    with pytest.raises(InputError) as caught:
        read_log(path)
    for words in ("no usable line", "'a,b'", "1 fields between tabs", "user, item, rating and Unix time in seconds"):
        assert words in str(caught.value)


def test_missing_file_directory_and_device(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_log(tmp_path / "nothing")
    with pytest.raises(InputError, match="is a directory"):
        read_log(tmp_path)
    with pytest.raises(InputError, match="no regular file"):
        read_log("/dev/null")


def test_a_cut_off_download_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "u.data.gz"
    rows = movielens_rows(users=1000)
    data = gzip.compress(write_udata(tmp_path / "u.data", rows).read_bytes())
    path.write_bytes(data[: len(data) - 100])
    with pytest.raises(InputError, match=r"cut off after line \d+"):
        read_log(path)


def test_the_wrong_format_is_refused(tmp_path: Path) -> None:
    path = write_udata(tmp_path / "u.data", movielens_rows(users=2))
    with pytest.raises(InputError, match="is no Parquet file"):
        read_log(path, format="parquet")
    with pytest.raises(InputError, match="no usable line"):
        read_log(path, format="jsonl")


LINES = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=30).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.tuples(st.integers(), st.integers(), st.integers(), st.integers()).map(
        lambda row: "\t".join(map(str, row)).encode()
    ),
    st.lists(st.from_regex(r"[0-9a-z.:\"-]{0,8}", fullmatch=True), min_size=2, max_size=5).map(
        lambda row: ",".join(row).encode()
    ),
    st.sampled_from([b"1\t2\t3\t4", b"1::2::3::4", b"u,i,a,5", b'{"user":1,"item":2,"time":3}', b"user,item,time"]),
)


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(LINES, max_size=12), name=st.sampled_from([None, *FORMATS]), zipped=st.booleans())
def test_random_garbage_never_crashes_and_counts_add_up(
    tmp_path: Path, lines: list[bytes], name: Format | None, zipped: bool
) -> None:
    content = b"\n".join(lines)
    path = tmp_path / "log"
    path.write_bytes(gzip.compress(content) if zipped else content)
    try:
        log = read_log(path, format=name)
    except InputError as error:
        assert str(path) in str(error)  # noqa: PT017 - whether it raises depends on the garbage
        return
    header_or_blank = log.lines - len(log) - log.broken_count
    assert len(log) > 0
    # As many lines as line feeds, plus a last one without; every line has exactly one fate.
    total = content.count(b"\n") + (not content.endswith(b"\n"))
    text = content.removeprefix(b"\xef\xbb\xbf")  # a line of a byte order mark alone is blank
    blank = sum(not line.decode(errors="replace").strip() for line in text.split(b"\n"))
    assert log.lines == total
    assert 0 <= header_or_blank <= blank + 1
    assert len(log.broken) == min(5, log.broken_count)
    assert [line.line for line in log.broken] == sorted(line.line for line in log.broken)
    assert log.offsets[-1] == len(log)
    for user in range(len(log.users)):
        assert log.offsets[user] < log.offsets[user + 1]
