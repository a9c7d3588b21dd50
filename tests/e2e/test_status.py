"""`relaygr status` as an operator runs it: it repeats itself, names who crashed, and removes what they left."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relaygr_stream.settings.schema import Kafka
from relaygr_stream.settings.worker import Handover
from tests.e2e.fleet import Fleet


async def status(folder: Path, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "relaygr_stream", "status", "--config", str(folder / "settings.toml"), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    out, err = (stream.decode() for stream in await process.communicate())
    assert "Traceback" not in err
    return process.returncode, out, err


async def line(watching: asyncio.subprocess.Process) -> dict[str, Any]:
    assert watching.stdout is not None
    found: dict[str, Any] = json.loads(await watching.stdout.readline())
    print(found["odd"])  # shown where the test fails
    return found


@pytest.mark.stack
async def test_who_crashed_is_named_until_its_record_is_removed(embedded_settings: Kafka, tmp_path: Path) -> None:
    """In a fleet that signs its statuses; one that does not: test_acls.py."""
    async with Fleet(embedded_settings, tmp_path) as fleet:
        fleet.use(msgspec.structs.replace(fleet.settings, handover=Handover(secret="what this fleet shares")))
        fleet.start("trigger", "trigger")
        for name in ("w1", "w2"):
            fleet.start("worker", name)
        await fleet.ready("trigger", "w1", "w2")
        await fleet.lanes_settled("w1", "w2")

        watching = await status(tmp_path, "--watch", "--json")
        seen = await line(watching)
        while [each["name"] for each in seen["workers"]] != ["w1", "w2"] or not seen["triggers"]:
            seen = await line(watching)
        (trigger,) = (each["name"] for each in seen["triggers"])
        await asyncio.to_thread(fleet.children.pop("w2").kill)
        while "w2" not in (seen := await line(watching))["silent"]:
            pass
        assert any("relaygr status --forget w2" in each for each in seen["odd"])

        for name in ("w2", f"trigger/{trigger}"):
            code, out, err = await ended(await status(tmp_path, "--forget", name))
            assert code == 0, err
            assert f"removed the record of {name}" in out
        while "w2" in (seen := await line(watching))["silent"] or not seen["triggers"]:
            pass  # the trigger runs, and publishes another one
        watching.send_signal(signal.SIGINT)
        code, _, err = await ended(watching)
        assert code == 0, err
        assert err.endswith("stopped\n"), err  # where a broker answers late, there are warnings before it

        code, _, err = await ended(await status(tmp_path, "--forget", "nobody"))
        assert code == 2
        assert "no record of that name" in err
