"""`relaygr replay` as an operator runs it: a MovieLens file by its path, against running processes."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

import pytest

from relaygr_stream.settings.schema import Kafka
from tests.e2e.fleet import Fleet, serving_fleet


def write_u_data(path: Path) -> None:
    """As MovieLens 100K has it: user, item, rating, Unix seconds, tab-separated, in no order; and two broken lines."""
    rng = random.Random(4)
    lines = [
        f"{user}\t{rng.randrange(1, 1683)}\t{rng.randrange(1, 6)}\t{880000000 + 40000 * user + 30 * at}"
        for user in range(1, 41)
        for at in range(60)
    ]
    rng.shuffle(lines)
    lines[100] = "7\t12\tfive\t881250949"
    lines[500] = "half a line"
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.stack
async def test_u_data_runs_from_file_to_hit_rate(embedded_settings: Kafka, tmp_path: Path) -> None:
    events, report = tmp_path / "u.data", tmp_path / "report.json"
    write_u_data(events)
    async with serving_fleet(embedded_settings, tmp_path, "w1"):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "relaygr_stream", "replay", "--events", events.name),
            *("--config", str(tmp_path / "settings.toml"), "--requests", "150", "--rate", "30", "--candidates", "50"),
            *("--timeout", "20", "--json", str(report)),
            cwd=tmp_path,  # the report wraps its lines, and with a long path in them elsewhere
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = (stream.decode() for stream in await process.communicate())
    assert process.returncode == 0, err
    assert "HR@10" in out
    assert "NDCG@10" in out
    assert "u.data:101: action 'five'" in out
    assert "u.data:501:" in out
    assert "150" in json.dumps(json.loads(report.read_text()))


@pytest.mark.stack
async def test_where_no_worker_is_ready_it_says_so_and_waits_for_one(embedded_settings: Kafka, tmp_path: Path) -> None:
    async with Fleet(embedded_settings, tmp_path) as fleet:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "relaygr_stream", "replay", "--generate", "--requests", "2", "--rate", "50"),
            *("--timeout", "20", "--config", str(tmp_path / "settings.toml"), "--candidates", "50"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        err = ""
        while "no worker is ready; waiting for one" not in err:
            line = (await process.stderr.readline()).decode()
            assert line, err
            err += line
        assert "relaygr status" in err
        fleet.start("worker", "w1")
        out, _ = (stream.decode() for stream in await process.communicate())
    assert process.returncode == 0, out
    assert "2 sent, 2 answered" in out
