"""The demo's requests from a generator or a log, and what a checkpoint must know for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from relaygr_lab.demo.run import deviations_of
from relaygr_lab.demo.traffic import NEWEST, TURNS, Requests, by_reference, newest_only, requests_of
from relaygr_lab.processes import known_items

from relaygr_stream.cli.main import main
from relaygr_stream.errors import InputError, ModelError
from relaygr_stream.history.sqlite_store import SqliteStore
from relaygr_stream.models.hstu_model import HSTUConfig
from relaygr_stream.models.item_ids import ITEMS_FILE
from relaygr_stream.models.loading import random_model, save_checkpoint
from relaygr_stream.settings.load import load_settings
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.worker import Model
from relaygr_stream.wire.codec import check_features, decode, encode
from relaygr_stream.wire.features import FeatureColumn, FeatureSchema
from relaygr_stream.wire.history import HistoryReference
from relaygr_stream.wire.messages import Outcome, RequestEvent
from relaygr_stream.workload.driver import Result
from relaygr_stream.workload.items import WorkItem, with_zero_features

ITEMS = 40
CONFIG = HSTUConfig(layers=1, dim=8, heads=1, dqk=8, dv=8, scale_tokens=8, vocab=ITEMS, max_positions=8, tasks=("a",))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(random_model(CONFIG, 1), folder)
    return folder


def settings_of(checkpoint: Path) -> Settings:
    return load_settings(["demo"], {"model.checkpoint": str(checkpoint)}).settings


def log_of(folder: Path, first: int) -> Path:
    """Three users with 30 behaviours each, of the items first … first + 39."""
    file = folder / "log.csv"
    lines = [f"u{number % 3},{first + number * 7 % ITEMS},{1_700_000_000 + number}" for number in range(90)]
    file.write_text("\n".join(["user,item,time", *lines]), encoding="utf-8")
    return file


def test_generated_requests_stay_within_the_checkpoints_items_and_the_same_seed_gives_the_same(
    checkpoint: Path,
) -> None:
    settings = settings_of(checkpoint)
    requests = requests_of(settings, None, seconds=5, rate=4, seed=3)
    again = requests_of(settings, None, seconds=5, rate=4, seed=3)
    assert [item.request for item in requests.measured] == [item.request for item in again.measured]
    assert requests.warm_up and all(item.at < 5 for item in requests.measured)
    for item in (*requests.warm_up, *requests.measured):
        assert np.frombuffer(item.request.candidates, "<u4").max() < ITEMS
        assert item.request.prefix.arrays()[0].max() < ITEMS


def test_the_last_phase_asks_the_same_with_the_newest_behaviours_only() -> None:
    settings = msgspec.structs.replace(load_settings(["demo"]).settings, model=Model(vocab=1000))
    requests = requests_of(settings, None, seconds=5, rate=4, seed=3)
    assert len(requests.newest) == len(requests.measured) > 0
    for item, short in zip(requests.measured, requests.newest, strict=True):
        assert len(short.request.prefix) + len(short.request.suffix) == NEWEST
        assert item.request.prefix.slice(len(item.request.prefix) - NEWEST + 8, 10_000) == short.request.prefix
        assert (item.request.suffix, item.request.candidates, item.target) == (
            short.request.suffix, short.request.candidates, short.target,
        )  # fmt: skip
    one = newest_only(requests.measured[0], 3)  # fewer than the suffix has: a request has a prefix
    assert len(one.request.prefix) == 1


def test_the_modes_take_turns_with_the_same_requests() -> None:
    requests = requests_of(load_settings(["demo"]).settings, None, seconds=5.0, rate=4.0, seed=7)
    turns = list(requests.turns())
    assert len(turns) == TURNS
    for number, mode in enumerate((requests.relayed, requests.measured, requests.newest)):
        parts = [turn[number] for turn in turns]
        assert [item.request for part in parts for item in part] == [item.request for item in mode]
        assert all(part[0].at == 0.0 for part in parts)
        gaps = np.diff([item.at for item in mode])
        assert np.allclose(np.diff([item.at for item in parts[1]]), gaps[len(parts[0]) :][: len(parts[1]) - 1])
    one = Requests([], requests.measured[:1], requests.measured[:1], requests.newest[:1])
    assert len(list(one.turns())) == 1


@pytest.mark.parametrize("seed", range(4))
def test_the_shortest_run_has_a_request(seed: int) -> None:
    requests = requests_of(load_settings(["demo"]).settings, None, seconds=1, rate=0.1, seed=seed)
    assert requests.measured[0].at < 1
    assert len(requests.newest) == len(requests.measured)


@pytest.mark.parametrize("columns", [False, True], ids=["ids", "features"])
async def test_requests_by_reference_name_the_histories_that_they_carried(tmp_path: Path, columns: bool) -> None:
    settings = msgspec.structs.replace(load_settings(["demo"]).settings, model=Model(vocab=1000))
    measured = requests_of(settings, None, seconds=20, rate=4, seed=3).measured
    if columns:
        schema = FeatureSchema((FeatureColumn(name="dwell_s", of="behaviour", dtype="float32"),))
        measured = [with_zero_features(item, schema) for item in measured]
    last = measured[-1]
    turned = replace(last, event=msgspec.structs.replace(last.event, prefix=measured[0].event.prefix.slice(1, 9)))
    store = SqliteStore(tmp_path / "histories")
    *referring, carrying = await by_reference([*measured, turned], store)
    assert len({item.event.user_id for item in referring}) < len(referring), "somebody returns"
    for carried, item in zip(measured, referring, strict=True):
        reference = item.request.history
        assert isinstance(reference, HistoryReference)
        assert (item.event.history, len(item.request.prefix), len(item.event.prefix)) == (reference, 0, 0)
        found = await store.read(item.event.user_id, "", reference.version, 0, reference.length)
        assert found.slice(0, reference.length) == carried.request.prefix
        assert HistoryReference.from_behaviours(found).digest == reference.digest
        assert decode(RequestEvent, encode(item.event)) == item.event
    assert carrying is turned
    await store.close()


def test_a_log_of_the_checkpoints_ids_is_taken_as_it_is(checkpoint: Path, tmp_path: Path) -> None:
    requests = requests_of(settings_of(checkpoint), log_of(tmp_path, 0), seconds=5, rate=4, seed=3)
    assert len(requests.measured) == 20
    assert {item.event.user_id for item in requests.measured} == {"u0", "u1", "u2"}


def test_an_item_beyond_the_checkpoint_is_an_error_that_names_it(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no row for \d+ of its items, '4\d' among them; .* knows the ids 0 to 39"):
        requests_of(settings_of(checkpoint), log_of(tmp_path, 9), seconds=5, rate=4, seed=3)


def test_ids_of_a_file_become_rows_by_the_trainings_list(tmp_path: Path) -> None:
    folder = tmp_path / "trained"
    save_checkpoint(random_model(CONFIG, 1), folder)
    names = [str(item) for item in range(1000 + ITEMS - 1, 999, -1)]  # row 0 is item 1039
    (folder / ITEMS_FILE).write_text(json.dumps(names), encoding="utf-8")
    log = log_of(tmp_path, 1000)
    requests = requests_of(settings_of(folder), log, seconds=5, rate=4, seed=3)
    last = requests.measured[-1]  # of the last line: item 1000 + 89 * 7 % 40
    assert last.target is not None
    row = np.frombuffer(last.request.candidates, "<u4")[last.target]
    assert names[row] == str(1000 + 89 * 7 % ITEMS)
    (folder / ITEMS_FILE).write_text(json.dumps(names[9:]), encoding="utf-8")
    with pytest.raises(InputError, match=r"'10\d\d' among them; items\.json in .* lists 31 others"):
        requests_of(settings_of(folder), log, seconds=5, rate=4, seed=3)


def test_a_checkpoint_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder; a checkpoint is a folder with"):
        known_items(settings_of(tmp_path / "absent").model)
    with pytest.raises(ModelError, match=r"config\.json: cannot be read: No such file"):
        known_items(settings_of(tmp_path).model)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--events", "log.csv"], "--events goes with --checkpoint FOLDER"),
        (["--events", "log.csv", "--checkpoint", "{}"], "log.csv"),
        (["--checkpoint", "absent"], "absent: no such folder"),
    ],
)
def test_the_command_says_what_is_wrong_before_it_starts_anything(
    arguments: list[str], said: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(main, ["demo", *(one.format(checkpoint) for one in arguments)])
    assert shown.exit_code != 0
    assert said in shown.output + str(shown.exception)
    assert "starting" not in shown.output


@pytest.mark.parametrize("which", ["rollout", "scenarios"])
def test_each_demo_draws_into_a_file_of_its_own(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Path] = []

    async def run(_kind: object, _settings: object, out: Path) -> int:
        drawn.append(out)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"relaygr_lab.demo.{which}.run_{which}_demo", run)
    assert CliRunner().invoke(main, ["demo", f"--{which}"]).exit_code == 0
    assert drawn == [Path(f"out/relaygr-demo-{which}.png")]


def test_requests_have_the_features_that_the_checkpoint_reads(tmp_path: Path) -> None:
    column = FeatureColumn(name="dwell_s", of="behaviour", dtype="float32")
    save_checkpoint(random_model(msgspec.structs.replace(CONFIG, features=(column,)), 1), tmp_path / "checkpoint")
    settings = settings_of(tmp_path / "checkpoint")
    file = log_of(tmp_path, 0)
    with pytest.raises(InputError, match="no column `dwell_s`"):
        requests_of(settings, file, seconds=5, rate=4, seed=3)
    first, *lines = file.read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join([f"{first},dwell_s", *(f"{line},{at}" for at, line in enumerate(lines))]))
    for events in (None, file):
        requests = requests_of(settings, events, seconds=5, rate=4, seed=3)
        for item in (*requests.warm_up, *requests.measured, *requests.newest):
            check_features(item.request, FeatureSchema([column]))


def test_scores_of_the_newest_behaviours_alone_are_not_compared_with_full_inference() -> None:
    item = cast(WorkItem, None)

    def result(outcome: Outcome, score: float) -> Result:
        return Result(item, outcome, None, "", 10.0, np.array([[score]], np.float32), None)

    relay = {"a": result("hbm", 1.0), "b": result("truncated", 9.0), "c": result("joined", 2.0)}
    full = {"a": result("full", 1.0), "b": result("full", 2.0)}
    assert deviations_of(relay, full) == [0.0]
    assert deviations_of({"a": result("hbm", 2.0)}, full) == [1.0]
