"""Logs with feature columns: read from every format, and sent with the requests that they belong to."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from relaygr_stream.cli.replay import replay_command
from relaygr_stream.errors import InputError
from relaygr_stream.wire.codec import check_features
from relaygr_stream.wire.features import NO_FEATURES, FeatureColumn, FeatureSchema
from relaygr_stream.workload.generator import Generator, GeneratorOptions
from relaygr_stream.workload.logs import InteractionLog, read_log
from relaygr_stream.workload.replay import Replay, ReplayOptions

SCHEMA = FeatureSchema(
    [
        FeatureColumn(name="age", of="user", dtype="int32"),
        FeatureColumn(name="taste", of="user", dtype="float32", width=2),
        FeatureColumn(name="dwell_s", of="behaviour", dtype="float32"),
        FeatureColumn(name="shop", of="candidate", dtype="int64"),
        FeatureColumn(name="affinity", of="cross", dtype="float32"),
    ]
)
USERS, ITEMS, EACH = 6, 30, 24


def rows() -> list[dict[str, Any]]:
    """Interactions whose features say which row they are of; items repeat."""
    made: list[dict[str, Any]] = []
    for index in range(USERS * EACH):
        made.append(
            {
                "user": f"u{index % USERS}",
                "item": index * 7 % ITEMS,
                "time": 1_600_000_000 + index,
                "age": -index,
                "taste": [index + 0.5, index / 4],
                "dwell_s": index * 2.0,
                "shop": (1 << 40) + index,
                "affinity": index + 0.25,
            }
        )
    return made


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """The row without its list."""
    first, second = row["taste"]
    return {name: value for name, value in row.items() if name != "taste"} | {"taste.0": first, "taste.1": second}


def write_csv(path: Path, made: list[dict[str, Any]]) -> Path:
    lines = [",".join(flat(made[0])), *(",".join(map(str, flat(row).values())) for row in made)]
    path = path / "log.csv"
    path.write_text("\n".join(lines))
    return path


def write_jsonl(path: Path, made: list[dict[str, Any]]) -> Path:
    path = path / "log.jsonl"
    path.write_text("\n".join(json.dumps(row if index % 2 else flat(row)) for index, row in enumerate(made)))
    return path


def write_parquet(path: Path, made: list[dict[str, Any]], form: Callable[[Any], Any] = dict) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = path / "log.parquet"
    parquet.write_table(arrow.Table.from_pylist([form(row) for row in made]), path)
    return path


def write_flat_parquet(path: Path, made: list[dict[str, Any]]) -> Path:
    return write_parquet(path, made, flat)


@pytest.fixture
def log(tmp_path: Path) -> InteractionLog:
    return read_log(write_csv(tmp_path, rows()), features=SCHEMA)


@pytest.mark.parametrize("write", [write_csv, write_jsonl, write_parquet, write_flat_parquet])
def test_every_format_gives_the_same_features(write: Callable[..., Path], tmp_path: Path) -> None:
    log = read_log(write(tmp_path, rows()), features=SCHEMA)
    assert (len(log), log.broken_count, log.schema) == (USERS * EACH, 0, SCHEMA)
    index = np.array([user + USERS * place for user in range(USERS) for place in range(EACH)])
    assert {name: values.dtype.name for name, values in log.features.items()} == {
        one.name: one.dtype for one in SCHEMA.columns
    }
    assert (log.features["age"][:, 0] == -index).all()
    assert (log.features["taste"] == np.stack([index + 0.5, index / 4], 1)).all()
    assert (log.features["shop"][:, 0] == (1 << 40) + index).all()


def test_each_request_has_the_features_of_its_rows(log: InteractionLog) -> None:
    made = rows()
    of_user = {f"u{user}": made[user::USERS] for user in range(USERS)}
    repeated = 0
    for item in Replay(log, ReplayOptions(requests=10**6, candidates=8, suffix=3, min_history=4, max_prefix=9)):
        request = item.request
        check_features(item.event, SCHEMA)
        check_features(request, SCHEMA)
        assert item.target is not None
        assert request.columns and item.event.columns
        times = np.frombuffer(request.suffix.times, "<i8")
        history = [row for row in of_user[request.user_id] if row["time"] * 1000 <= times[-1]]
        target = of_user[request.user_id][len(history)]
        sent = [*floats(request.prefix.table["dwell_s:float32"]), *floats(request.suffix.table["dwell_s:float32"])]
        assert sent == [row["dwell_s"] for row in history][-len(sent) :]
        assert request.columns.user == item.event.columns.user
        assert np.frombuffer(request.columns.user["age:int32"], "<i4").tolist() == [target["age"]]
        assert floats(request.columns.user["taste:float32"]) == target["taste"]
        ids = np.frombuffer(request.candidates, "<u4").tolist()
        assert ids[item.target] == target["item"]
        shops = np.frombuffer(request.columns.candidate["shop:int64"], "<i8").tolist()
        for candidate, shop in zip(ids, shops, strict=True):
            before = [row["shop"] for row in made if row["item"] == candidate and row["time"] < target["time"]]
            assert shop == (before or [row["shop"] for row in made if row["item"] == candidate])[-1 if before else 0]
        for candidate, affinity in zip(ids, floats(request.columns.candidate["affinity:float32"]), strict=True):
            seen = [row["affinity"] for row in history if row["item"] == candidate]
            repeated += bool(seen)
            assert affinity == (seen[-1] if seen else 0)
    assert repeated > 10


def floats(data: bytes) -> list[float]:
    values: list[float] = np.frombuffer(data, "<f4").tolist()
    return values


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("age", "old", "`age` is 'old'; expected an integer, int32"),
        ("age", "1.5", "`age` is '1.5'"),
        ("age", str(1 << 31), "`age` is '2147483648'"),
        ("age", "", "`age` is ''"),
        ("dwell_s", "nan", "`dwell_s` is 'nan'; expected float32"),
        ("dwell_s", "1e39", "`dwell_s` is '1e39'"),
        ("taste.1", "x", "`taste` is 'x'"),
    ],
)
def test_a_bad_value_breaks_its_line_alone(name: str, value: str, reason: str, tmp_path: Path) -> None:
    made = [flat(row) for row in rows()]
    made[9][name] = value
    path = tmp_path / "log.csv"
    path.write_text("\n".join([",".join(made[0]), *(",".join(map(str, row.values())) for row in made)]))
    log = read_log(path, features=SCHEMA)
    assert (len(log), log.broken_count) == (USERS * EACH - 1, 1)
    assert log.broken[0].line == 11
    assert log.broken[0].reason.startswith(reason)
    assert -9 not in log.features["age"]
    assert all(len(values) == len(log) for values in log.features.values())


@pytest.mark.parametrize(("value", "reason"), [(None, "is missing"), ([1.0], "no list of 2"), (True, "no list of 2")])
def test_a_list_of_another_length_breaks_its_line(value: Any, reason: str, tmp_path: Path) -> None:
    made = rows()
    made[5]["taste"] = value
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, made)))
    log = read_log(path, features=SCHEMA)
    assert log.broken_count == 1
    assert reason in log.broken[0].reason


@pytest.mark.parametrize("name", ["age", "dwell_s"])
def test_a_number_beyond_any_float_breaks_its_line(name: str, tmp_path: Path) -> None:
    made = rows()
    made[5][name] = 10**400
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, made)))
    log = read_log(path, features=SCHEMA)
    assert log.broken_count == 1
    assert f"`{name}` is '1000" in log.broken[0].reason


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    made = [{name: value for name, value in row.items() if name != "age"} for row in rows()]
    for write in (write_csv, write_parquet):
        with pytest.raises(InputError, match=r"no column `age` for the feature 'age' \(user, int32, width 1\)"):
            read_log(write(tmp_path, made), features=SCHEMA)
    bare = tmp_path / "u.data"
    bare.write_text("1\t2\t3\t881250949\n")
    with pytest.raises(InputError, match="no column `shop`"):
        read_log(bare, features=SCHEMA)


def test_the_command_reads_the_schema_and_names_what_is_wrong_with_it(tmp_path: Path) -> None:
    schema = tmp_path / "config.json"
    schema.write_text('{"features": [{"name": "age", "of": "user"}]}')
    for source in (["--generate"], ["--events", str(write_csv(tmp_path, rows()))]):
        result = CliRunner().invoke(replay_command, [*source, "--features", str(schema)])
        assert result.exit_code != 0
        assert re.search("config.json: .*dtype", result.output + str(result.exception))


@pytest.mark.parametrize("suffix", [0, 4])
def test_generated_requests_have_every_column_with_zeros(suffix: int) -> None:
    options = GeneratorOptions(users=3, items=50, candidates=5, suffix=suffix, length=30, features=SCHEMA)
    assert "features: 5 columns" in Generator(options).describe()
    plain = Generator(dataclasses.replace(options, features=NO_FEATURES))
    for item, known in itertools.islice(zip(Generator(options), plain, strict=True), 20):
        check_features(item.event, SCHEMA)
        check_features(item.request, SCHEMA)
        assert item.request.columns
        assert not any(b"".join([*item.request.columns.candidate.values(), *item.request.prefix.table.values()]))
        assert (item.request.candidates, item.request.prefix.items) == (
            known.request.candidates, known.request.prefix.items,
        )  # fmt: skip
