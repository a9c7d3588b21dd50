"""The bench of peers: what it judges, that its eager layers are ours, and that a dying peer is a reason in a row."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from engine_load import EngineLoad
from floors import Machine
from peers import PeersBench, deviation
from peers_process import PeerProcess
from peers_report import Result, Row, broken
from peers_runtimes import Row as PeerRow
from peers_runtimes import build, eager

from relaygr_stream import settings


def judged(floor: float, ours: float, *peers: Result) -> list[str]:
    return Row("float32", "score", floor, Result("ours", [ours, ours * 2]), list(peers)).broken()


def test_ours_must_be_the_fastest() -> None:
    assert judged(1.0, 1.2, Result("slow", [1.8]), Result("slower", [3.0])) == []
    assert judged(1.0, 1.2, Result("slow", [1.8]), Result("fast", [9.0, 1.1])) == [
        "float32: score: fast takes 0.92 × ours; bound: above 1"
    ]


def test_where_the_best_peer_leaves_room_ours_must_be_clearly_ahead() -> None:
    assert judged(1.0, 1.4, Result("peer", [1.89])) == []
    assert judged(1.0, 1.2, Result("peer", [1.9])) == []
    assert judged(1.0, 1.4, Result("peer", [1.9])) == [
        "float32: score: peer takes 1.90 × the floor and 1.36 × ours; bound: at least 1.5"
    ]


def test_a_peer_without_such_a_row_is_no_miss_and_a_failed_one_is() -> None:
    without = Result("a", problem="no bfloat16", unsupported=True)
    failed = Result("b", [0.5], problem="its process ended with -11")
    assert judged(1.0, 1.0, without, Result("peer", [1.7])) == []
    assert judged(1.0, 1.0, failed, Result("peer", [1.7])) == ["float32: score: b failed: its process ended with -11"]
    assert judged(1.0, 1.0, without) == ["float32: score: no peer ran, so nothing is compared"]


def test_the_table_and_the_report_say_why_a_peer_has_no_times() -> None:
    row = Row(
        "bfloat16", "score 64 on 512", 0.001, Result("ours", [0.002, 0.003]),
        [Result("slow", [0.004]), Result("a", problem="no bfloat16", unsupported=True), Result("b", problem="crashed")],
    )  # fmt: skip
    ours, slow, without, failed = row.lines()
    assert ours.split() == ["score", "64", "on", "512", "ours", "2.00", "2.50", "1.00", "2.00", "2", "0.0e+00"]
    assert slow.split() == ["slow", "4.00", "4.00", "2.00", "4.00", "1", "0.0e+00"]
    assert without.split() == ["a", "–", "no", "bfloat16"]
    assert failed.split() == ["b", "failed:", "crashed"]
    found = json.loads(json.dumps(row.as_json()))
    assert [each.get("ms") for each in found["results"]] == [2.0, 4.0, None, None]
    assert found["broken"] == broken([row]) == ["bfloat16: score 64 on 512: b failed: crashed"]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def load(request: pytest.FixtureRequest) -> EngineLoad:
    shape = settings.Model(layers=3, dim=32, heads=2, dqk=16, dv=8, scale_tokens=100)
    return EngineLoad(shape, torch.device("cpu"), getattr(torch, request.param))


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine(torch.device("cpu"))


@pytest.mark.parametrize("operation", ["ranking", "prefill"])
def test_the_eager_layers_compute_what_ours_compute(
    load: EngineLoad, machine: Machine, operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over more than one block of rows, and a last block that is not full."""
    monkeypatch.setattr("engine_load.COLD_BYTES", 1)  # no copies of the prefix KV
    bench = PeersBench(load, machine, {}, tmp_path, 0)
    ours = bench.ranking(300, 270) if operation == "ranking" else bench.prefill(530)
    bench.save(ours, tmp_path / "row.pt")
    row: PeerRow = build(tmp_path / "row.pt", 2, tmp_path)
    run = eager(row)
    allowed = 1e-5 if load.dtype == torch.float32 else 5e-2
    for _ in range(2):  # on both copies
        assert deviation(run(), ours.expected) <= allowed


def test_a_deviation_is_relative_and_other_shapes_are_infinitely_far() -> None:
    one = [torch.tensor([1.0, -4.0]), torch.tensor([2.0])]
    assert deviation(one, one) == 0
    assert deviation([torch.tensor([1.0, -3.0]), torch.tensor([2.0])], one) == 0.25
    assert deviation(one[:1], one) == deviation([one[1], one[0]], one) == float("inf")
    assert not deviation([torch.tensor([float("nan"), 0.0]), one[1]], one) <= 1


def peer(code: str, folder: Path) -> PeerProcess:
    return PeerProcess([sys.executable, "-c", code], folder / "log")


def test_a_peer_that_dies_is_a_reason_and_starts_again_for_the_next_row(tmp_path: Path) -> None:
    dying = peer(
        "import json, sys\nfor line in sys.stdin:\n"
        "    if json.loads(line)['do'] == 'die': sys.exit('out of luck')\n"
        "    print(json.dumps({'times': [1.0]}), flush=True)",
        tmp_path,
    )
    try:
        assert dying.ask({"do": "die"}) == {"failed": "its process ended with 1; its last words: out of luck"}
        assert dying.ask({"do": "turn"}) == {"times": [1.0]}
    finally:
        dying.stop()


def test_a_silent_peer_and_a_missing_python_are_reasons(tmp_path: Path) -> None:
    silent = peer("import sys\nsys.stdin.read()", tmp_path)
    assert silent.ask({"turn": 1}, timeout=0) == {"failed": "no answer within 0 s"}
    absent = PeerProcess([str(tmp_path / "python")], tmp_path / "log")
    assert absent.ask({"turn": 1}) == {"failed": f"{tmp_path / 'python'} does not start: No such file or directory"}


def test_what_a_peer_started_ends_with_it(tmp_path: Path) -> None:
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    starting = peer(
        f"import os, signal, sys\nheld = os.open({str(fifo)!r}, os.O_WRONLY)\nos.fork() or signal.pause()\n"
        "for line in sys.stdin:\n    print('{}', flush=True)",
        tmp_path,
    )
    try:
        assert starting.ask({}) == {}
        starting.stop()
        os.set_blocking(reader, True)
        assert os.read(reader, 1) == b""  # nobody holds it any more
    finally:
        starting.stop()
        os.close(reader)
