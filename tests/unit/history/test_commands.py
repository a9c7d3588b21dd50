"""`relaygr history`: a log in, histories in a store, and what is said of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from relaygr_stream.cli.main import main
from relaygr_stream.history.sqlite_store import SqliteStore
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.history import HistoryReference


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "histories"


def run(store: Path, *arguments: str | Path, settings: tuple[str, ...] = ()) -> Result:
    chosen = [f"--set={each}" for each in (f"history.store=sqlite:{store}", "history.timeout_ms=20000", *settings)]
    command, *rest = map(str, arguments)
    return CliRunner().invoke(main, ["history", command, *chosen, *rest])


def read(store: Path, user: str, tenant: str = "") -> tuple[HistoryReference | None, Behaviours]:
    async def both() -> tuple[HistoryReference | None, Behaviours]:
        opened = SqliteStore(store)
        try:
            return await opened.reference(user, tenant), await opened.read(user, tenant, 0, 0, 9999)
        finally:
            await opened.close()

    return asyncio.run(both())


def log(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(["user,item,action,time", *rows]) + "\n", encoding="utf-8")
    return path


def test_a_log_is_imported_appended_to_and_shown(tmp_path: Path, store: Path) -> None:
    first = log(tmp_path / "a.csv", "ann,5,1,2000000000", "bob,7,2,2000000001", "ann,6,3,2000000002")
    done = run(store, "import", first)
    assert (done.exit_code, done.stdout) == (0, "imported: 2 users; failed: 0\n")
    more = log(tmp_path / "b.csv", "ann,8,1,2000000003", "cid,9,1,2000000003")
    assert run(store, "append", more).stdout == "appended: 2 users; failed: 0\n"
    assert read(store, "ann")[1] == Behaviours.from_arrays(
        [5, 6, 8], [1, 3, 1], np.array([2000000000, 2000000002, 2000000003]) * 1000
    )
    shown = run(store, "show", "ann", "--last", "2")
    assert shown.exit_code == 0
    assert "3 behaviours, version 2, digest " in shown.output
    assert "earlier lengths with a digest: 2" in shown.output
    assert "2033-05-18 03:33:23" in shown.output
    assert run(store, "import", first).exit_code == 0  # anew: what was appended is gone
    assert len(read(store, "ann")[1]) == 2
    assert len(read(store, "cid")[1]) == 1


def test_who_cannot_be_appended_to_is_named_and_left_as_it_was(tmp_path: Path, store: Path) -> None:
    run(store, "import", log(tmp_path / "a.csv", "ann,5,1,2000000000", "bob,5,1,2000000000"))
    late = run(store, "append", log(tmp_path / "b.csv", "ann,5,1,1900000000", "bob,6,1,2000000001"))
    assert late.exit_code == 1
    assert "ann: times must not go back" in late.output
    assert "appended: 1 users; failed: 1" in late.output
    assert len(read(store, "ann")[1]) == 1
    for command in ("append", "import"):
        names = run(store, command, log(tmp_path / "c.csv", "ann,shoes,view,2000000009"))
        assert names.exit_code == 1
        assert "items are names" in names.output and "write the model's own" in names.output
    assert len(read(store, "ann")[1]) == 1
    halves = run(store, "import", log(tmp_path / "d.csv", "dan,5,4.5,2000000000"))
    assert (halves.exit_code, "stored doubled, 4.5 as 9" in halves.output) == (0, True)


def test_tenants_features_and_the_limit(tmp_path: Path, store: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"features": [{"name": "dwell", "of": "behaviour", "dtype": "float32"}]}))
    rows = "\n".join(f"ann,{at},1,{2000000000 + at},{at / 2}" for at in range(10))
    (tmp_path / "a.csv").write_text(f"user,item,action,time,dwell\n{rows}\n")
    limited = run(
        store,
        "import",
        tmp_path / "a.csv",
        "--features",
        schema,
        "--tenant",
        "shop",
        settings=("history.max_behaviours=4",),
    )
    assert limited.exit_code == 0, limited.output
    assert read(store, "ann")[0] is None
    kept = read(store, "ann", "shop")[1]
    assert kept.arrays()[0].tolist() == [6, 7, 8, 9]
    assert np.frombuffer(kept.table["dwell:float32"], "<f4").tolist() == [3.0, 3.5, 4.0, 4.5]
    assert "4.5" in run(store, "show", "ann", "--tenant", "shop").output
    rejected = ("relay.max_prefix_tokens=3",)  # a longer one is, by every worker
    run(store, "import", tmp_path / "a.csv", "--features", schema, settings=rejected)
    assert read(store, "ann")[1].arrays()[0].tolist() == [7, 8, 9]


def test_who_names_no_tenant_means_that_of_the_settings_as_clients_and_workers_do(tmp_path: Path, store: Path) -> None:
    """It meant "": an import was never found, and an erasure was reported as done while everything stayed."""
    shop = ("client.tenant=shop",)
    assert run(store, "import", log(tmp_path / "a.csv", "ann,5,1,2000000000"), settings=shop).exit_code == 0
    assert run(store, "append", log(tmp_path / "b.csv", "ann,6,1,2000000001"), settings=shop).exit_code == 0
    assert len(read(store, "ann", "shop")[1]) == 2
    assert "2 behaviours" in run(store, "show", "ann", settings=shop).output
    assert run(store, "show", "ann", settings=("client.tenant=",)).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "settings", "said"),
    [
        (("show", "nobody"), (), "the store has no history of this user"),
        (("show", "ann"), ("history.store=",), "history.store = '' names no store"),
        (("import", "no-such-file"), (), "no-such-file"),
        (("show", "ann"), ("history.store=redis://127.0.0.1:1/0",), "error: history.store: Redis: ConnectionError"),
        (("show", "ann"), ("history.store=sqlite:/no/such/folder/x",), "unable to open database file"),
    ],
)
def test_what_cannot_be_done_is_said(
    store: Path, arguments: tuple[str, ...], settings: tuple[str, ...], said: str
) -> None:
    done = run(store, *arguments, settings=settings)
    assert done.exit_code == 1
    assert said in done.output


@pytest.mark.parametrize("rows", [("ann,6,1,2000000001",), ("ann,6,1,2000000001", "ann,7,1,2000000002")])
def test_the_same_append_again_appends_nothing(tmp_path: Path, store: Path, rows: tuple[str, ...]) -> None:
    """It was stopped before its end, and runs again; one more behaviour at the same time is appended all the same."""
    run(store, "import", log(tmp_path / "a.csv", "ann,5,1,2000000000"))
    added = log(tmp_path / "b.csv", *rows)
    assert "appended: 1 users; failed: 0" in run(store, "append", added).output
    again = run(store, "append", log(added, *rows, "bob,1,1,2000000000"))
    assert again.exit_code == 0
    assert "appended: 1 users; there already: 1; failed: 0" in again.output
    assert len(read(store, "ann")[1]) == 1 + len(rows)
    newest = rows[-1].replace(",1,", ",2,")
    assert run(store, "append", log(tmp_path / "c.csv", newest)).exit_code == 0
    assert len(read(store, "ann")[1]) == 2 + len(rows)


@pytest.mark.parametrize("command", ["show", "erase"])
def test_a_mistyped_file_is_not_made_by_what_only_reads(tmp_path: Path, command: str) -> None:
    unreachable = ("kafka.bootstrap=127.0.0.1:1",)
    assert run(tmp_path / "typo.db", command, "ann", settings=unreachable).exit_code == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("tenant", "said"), [("", "of no tenant"), ("shop", "of tenant shop")])
def test_who_has_no_history_is_named_with_the_tenant(store: Path, tenant: str, said: str) -> None:
    assert said in run(store, "show", "nobody", settings=(f"client.tenant={tenant}",)).output


@pytest.mark.parametrize("name", ["redis:/localhost:6379/0", "redis", "my_store:make()", "my_store:"])
def test_a_mistyped_store_is_named_with_what_can_be_written(store: Path, name: str) -> None:
    done = run(store, "show", "ann", settings=(f"history.store={name}",))
    assert done.exit_code == 1
    assert f"{name!r} names no store: set it to redis://HOST:PORT/DB" in done.output


def no_store(_: object) -> None:
    """A factory of somebody's, whose environment is not set up."""
    raise KeyError("HISTORIES_DB")


def test_a_factory_that_raises_is_one_line_with_its_place(store: Path) -> None:
    done = run(store, "show", "ann", settings=(f"history.store={__name__}:no_store",))
    assert done.exit_code == 1
    assert f"error: history.store = {__name__}:no_store: KeyError: 'HISTORIES_DB' ({__file__}:" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("command", ["import", "append", "show", "erase"])
def test_an_empty_tenant_is_refused(store: Path, tmp_path: Path, command: str) -> None:
    """A script whose variable is not set would erase another tenant's user."""
    about = log(tmp_path / "a.csv", "ann,5,1,2000000000") if command in ("import", "append") else "ann"
    done = run(store, command, about, "--tenant", "")
    assert done.exit_code == 2 and "is empty: name a tenant" in done.output
