"""`relaygr up --rolling`: an `up` is found on its host, asked, and followed. Here it is a door alone."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from relaygr_stream.cli.main import main
from relaygr_stream.errors import RelayError
from relaygr_stream.ops import door as service
from relaygr_stream.ops.door import RollDoor, ask_to_roll
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets")


@pytest.fixture(autouse=True)
def own_doors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this machine run `up`, too."""
    monkeypatch.setattr(service, "PREFIX", f"relaygr-test-door-{os.getpid()}-")


class Rolls:
    """Futures of the rolls that were asked for."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[str]] = []

    def __call__(self) -> asyncio.Future[str]:
        self.asked.append(asyncio.get_running_loop().create_future())
        return self.asked[-1]


@pytest.mark.parametrize("why", ["", "w-1 ended with exit code 78, starts again in 0.5 s"])
async def test_who_asks_sees_each_state_and_how_it_went(why: str) -> None:
    found, rolls, lines = RollDoor("w"), Rolls(), list[str]()
    async with found.open(rolls):
        asking = asyncio.create_task(asyncio.to_thread(ask_to_roll, None, lines.append))
        await until(lambda: len(rolls.asked) == 1, "asked")
        found.tell("w-0 stopping")
        found.tell("w-0 \N{SNOWMAN} ready")
        rolls.asked[0].set_result(why)
        assert await asking == why
    assert lines == ["w-0 stopping", "w-0 \N{SNOWMAN} ready"]


def test_an_up_that_ends_while_someone_looks_prints_nothing() -> None:
    said: list[object] = []

    async def ends() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        async with RollDoor("w").open(Rolls()):
            listed = service.LISTED.read_text(encoding="utf-8", errors="replace").split()
            (name,) = (word for word in listed if word.startswith(f"@{service.PREFIX}"))
            reader, writer = await asyncio.open_unix_connection(f"\0{name[1:]}")
            assert await reader.readline()
        writer.close()

    asyncio.run(ends())
    assert not said


async def test_an_up_that_ends_before_the_roll_is_over_is_told() -> None:
    rolls = Rolls()
    async with RollDoor("w").open(rolls):
        asking = asyncio.create_task(asyncio.to_thread(ask_to_roll, "w", print))
        await until(lambda: len(rolls.asked) == 1, "asked")
    assert "ended before" in await asking


async def test_of_several_the_name_chooses_and_without_one_nobody_is_asked() -> None:
    first, second = Rolls(), Rolls()
    async with RollDoor("a").open(first), RollDoor("b").open(second):
        with pytest.raises(RelayError, match=rf"several run on this host: a \(pid {os.getpid()}\), b .*--name"):
            await asyncio.to_thread(ask_to_roll, None, print)
        with pytest.raises(RelayError, match=r"--name c: no `relaygr up` of this name runs .*there is a \(pid"):
            await asyncio.to_thread(ask_to_roll, "c", print)
        asking = asyncio.create_task(asyncio.to_thread(ask_to_roll, "b", print))
        await until(lambda: len(second.asked) == 1, "asked")
        assert not first.asked
        second.asked[0].set_result("")
        assert await asking == ""


async def test_who_only_looks_or_writes_something_else_rolls_nothing() -> None:
    rolls = Rolls()
    async with RollDoor("w").open(rolls):
        for said in (b"", b"stop\n", b"\xff" * 100_000):
            reader, writer = await asyncio.open_unix_connection(_addresses()[0])
            assert b'"name":"w"' in await reader.readline()
            writer.write(said)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        assert not rolls.asked


async def test_another_users_door_is_not_believed_and_another_user_is_not_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rolls = Rolls()
    async with RollDoor("w").open(rolls):
        monkeypatch.setattr(service, "_is_ours", lambda peer: False)
        with pytest.raises(RelayError, match="no `relaygr up` of this user runs on this host"):
            await asyncio.to_thread(ask_to_roll, None, print)
        reader, writer = await asyncio.open_unix_connection(_addresses()[0])
        assert await reader.read() == b""
        writer.close()
    assert not rolls.asked


@contextmanager
def silent() -> Iterator[None]:
    """A door whose `up` says nothing, as one that is stopped."""
    with socket.socket(socket.AF_UNIX) as found:
        found.bind(f"\0{service.PREFIX}silent")
        found.listen()
        yield


async def test_an_up_that_does_not_say_who_it_is_hides_no_other() -> None:
    rolls = Rolls()
    with silent():
        async with RollDoor("w").open(rolls):
            asking = asyncio.create_task(asyncio.to_thread(ask_to_roll, None, print))
            await until(lambda: rolls.asked or asking.done(), "asked")
            assert len(rolls.asked) == 1, asking.result()
            rolls.asked[0].set_result("")
            assert await asking == ""


def test_without_an_up_the_command_says_so() -> None:
    result = CliRunner().invoke(main, ["up", "--rolling"])
    assert result.exit_code == 1
    assert "no `relaygr up` of this user runs on this host" in result.output


def test_options_of_a_new_up_are_refused_beside_it() -> None:
    result = CliRunner().invoke(main, ["up", "--rolling", "--workers", "1", "--set", "worker.hbm_bytes=1GiB"])
    assert result.exit_code == 2
    assert "leave out --workers, --set" in result.output


def _addresses() -> list[str]:
    listed = Path("/proc/net/unix").read_text(encoding="utf-8").split()
    return sorted({f"\0{word[1:]}" for word in listed if word.startswith(f"@{service.PREFIX}")})
