from __future__ import annotations

import builtins
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from relaygr_lab.demo.plot import draw, save_plot

from relaygr_stream.errors import ConfigError
from tests.unit.demo.test_report import GOOD


@pytest.fixture(autouse=True)
def _cache_here(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path_factory.getbasetemp() / "matplotlib"))


@pytest.mark.parametrize(
    "result",
    [
        GOOD,
        replace(GOOD, full_ms=[], relay_ms=[5.0], outcomes=["hbm"]),
        replace(GOOD, full_ms=[], relay_ms=[], outcomes=[], admitted=0, admitted_hits=0),
    ],
    ids=["a whole run", "one answer", "no answer"],
)
def test_a_run_becomes_a_png(result: Any, tmp_path: Path) -> None:
    path = save_plot(result, tmp_path / "out" / "demo.png")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data[-8:-4] == b"IEND"


@pytest.mark.parametrize(("answers", "named"), [(1, ""), (2, "● P50"), (99, "● P50"), (100, "● P50, ■ P99")])
def test_quantiles_are_named_where_they_are_drawn(answers: int, named: str, tmp_path: Path) -> None:
    few = replace(GOOD, relay_ms=GOOD.relay_ms[:answers], full_ms=GOOD.full_ms[:answers])
    axes = draw(few, tmp_path / "x.png").axes[0]
    title = axes.get_title().splitlines()[1]
    assert title == f"{answers:,} answers, each also in full{'; ' if named else ''}{named}"
    markers = {line.get_marker() for line in axes.get_lines()} - {"None"}
    assert markers == {"o" for _ in named[:1]} | {"s" for _ in named if "P99" in named}


def test_the_bars_show_where_rankings_found_it_and_what_made_it_ready(tmp_path: Path) -> None:
    prepared = {"computed": 300, "extended": 40, "hbm": 500, "dram": 77, "joined": 3}
    axes = draw(replace(GOOD, prepared=prepared), tmp_path / "x.png").axes[1]
    texts = [text.get_text() for text in axes.texts]
    assert "1,000 rankings" in texts and "920 pre-infer signals" in texts
    named = dict(zip([label.get_text() for label in axes.get_yticklabels()], axes.patches, strict=True))
    assert named["reloaded from DRAM"].get_width() == 77  # type: ignore[attr-defined]
    assert named["in DRAM, reloaded"].get_width() == 150  # type: ignore[attr-defined]
    from matplotlib.text import Text  # behind MPLCONFIGDIR

    hits = "97.0% of 1,000 admitted requests hit, 97.0% of all 1,000"
    assert hits in axes.get_title(loc="right")
    figure = axes.figure
    figure.canvas.draw()
    (title,) = (each for each in axes.get_children() if isinstance(each, Text) and hits in each.get_text())
    assert title.get_window_extent().x1 <= figure.bbox.x1, "the title ends beyond the picture"


def test_two_runs_give_two_pictures(tmp_path: Path) -> None:
    one = save_plot(GOOD, tmp_path / "1.png").read_bytes()
    other = save_plot(replace(GOOD, relay_ms=[9.0] * 1000), tmp_path / "2.png").read_bytes()
    assert one != other


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(ConfigError, match="extra `plot`"):
        save_plot(GOOD, tmp_path / "x.png")


def test_matplotlib_and_torch_are_loaded_only_when_needed() -> None:
    code = (
        "import sys; from relaygr_lab.demo import live, plot, report; "
        "print([m for m in ('matplotlib', 'torch') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
