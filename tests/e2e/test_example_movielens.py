from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from examples.movielens.__main__ import main


@pytest.mark.stack
def test_the_example_trains_serves_and_finds_equal_ranks_on_a_csv_of_another_origin(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHECK", "1")
    draw = np.random.default_rng(2)
    lines = ["user,item,time"]
    for user in range(12):
        items = draw.permutation(260)[: 210 if user == 0 else 30]
        lines += [f"u{user},i{item},{1_600_000_000 + 60 * at}" for at, item in enumerate(items)]
    file, out = tmp_path / "log.csv", tmp_path / "out"
    file.write_text("\n".join(lines), encoding="utf-8")
    arguments = ["--data", str(file), "--out", str(out), "--quick", "--threads", "1"]
    code = main([*arguments, "--epochs", "1", "--dim", "16", "--longest", "50", "--validation-users", "5"])
    printed = capfd.readouterr().out
    assert code == 0, printed
    found = json.loads((out / "report.json").read_text(encoding="utf-8"))
    relay, full = found["served"]
    assert (relay["same_rank"], full["same_rank"]) == (1.0, 1.0)
    assert full["outcomes"] == {"full": 12}
    assert sum(relay["outcomes"].values()) == 12
    assert "every property holds" in printed
    assert (out / "length.svg").exists()
