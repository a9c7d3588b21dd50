"""Private brokers: they start, explain why not, and leave nothing behind, however their owner ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from relaygr_stream.errors import BrokerUnavailable
from relaygr_stream.ops.brokers.local import BrokerKind, local_broker
from relaygr_stream.settings.schema import Kafka
from tests import needs
from tests.waiting import until

KINDS = ["embedded", pytest.param("kafka", marks=pytest.mark.kafka)]

OWNER = """
import asyncio, signal, sys
from pathlib import Path
from relaygr_stream.ops.brokers.local import local_broker

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

async def main():
    async with local_broker(sys.argv[1], folder=Path(sys.argv[2])) as broker:
        print(broker.bootstrap, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> BrokerKind:
    if request.param == "kafka":
        needs.kafka_home()
    return request.param  # type: ignore[no-any-return]


def _is_empty(folder: Path) -> bool:
    return not list(folder.iterdir())


def _mentioning(folder: Path) -> list[psutil.Process]:
    """Running processes that were started with this folder in their command line."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and process.pid != os.getpid()
        and any(str(folder) in argument for argument in process.info["cmdline"] or ())
    ]


async def test_nothing_is_left_after_the_block(kind: BrokerKind, tmp_path: Path) -> None:
    async def fail_inside() -> None:
        async with local_broker(kind, folder=tmp_path) as broker:
            kafka = broker.kafka_settings(Kafka(prefix="kept."))
            assert (kafka.bootstrap, kafka.prefix) == (broker.bootstrap, "kept.")
            assert _mentioning(tmp_path)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_inside()
    assert not _mentioning(tmp_path)
    assert _is_empty(tmp_path)


@pytest.mark.parametrize("killed_by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_nothing_is_left_when_the_owner_is_killed(
    kind: BrokerKind, tmp_path: Path, killed_by: signal.Signals
) -> None:
    if kind == "kafka" and killed_by != signal.SIGKILL:
        pytest.skip("seen on the embedded broker: the same keeper does the same")
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, kind, str(tmp_path), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    host, port = (await owner.stdout.readline()).decode().strip().split(":")
    brokers = _mentioning(tmp_path)
    brokers += [child for process in brokers for child in process.children(recursive=True)]
    assert brokers
    owner.send_signal(killed_by)
    await owner.communicate()
    await until(lambda: not any(process.is_running() for process in brokers), "all gone")
    await until(lambda: _is_empty(tmp_path), "folder removed")
    with pytest.raises(OSError, match=r".*"):
        await asyncio.open_connection(host, int(port))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the broker with its keeper on Linux only")
async def test_the_broker_ends_with_its_keeper(tmp_path: Path) -> None:
    async with local_broker("embedded", folder=tmp_path):
        (keeper,) = [process for process in _mentioning(tmp_path) if process.children()]
        (broker,) = keeper.children()
        keeper.kill()

        def gone() -> bool:
            try:
                return bool(broker.status() == psutil.STATUS_ZOMBIE)
            except psutil.NoSuchProcess:
                return True

        await until(gone, "broker gone")


async def test_a_broker_that_does_not_start_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    for name in ("bin/kafka-storage.sh", "bin/kafka-server-start.sh", "config/server.properties"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("#!/bin/sh\necho the disk is made of cheese\n[ $1 = format ] || exit 3\n")
        (home / name).chmod(0o755)
    monkeypatch.setenv("KAFKA_HOME", str(home))
    with pytest.raises(BrokerUnavailable, match=r"(?s)status 3.*the disk is made of cheese"):
        async with local_broker("kafka", folder=tmp_path / "data"):
            pass
    assert _is_empty(tmp_path / "data")


async def test_a_missing_or_wrong_kafka_home_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAFKA_HOME", raising=False)
    with pytest.raises(BrokerUnavailable, match="KAFKA_HOME is not set"):
        async with local_broker("kafka", folder=tmp_path):
            pass
    monkeypatch.setenv("KAFKA_HOME", str(tmp_path))
    with pytest.raises(BrokerUnavailable, match=r"has no bin/kafka-storage\.sh"):
        async with local_broker("kafka", folder=tmp_path):
            pass
