"""Commands that look at a cluster end in bounded time, also where a broker accepts connections and answers nothing."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from relaygr_stream.cli.main import main
from relaygr_stream.errors import BrokerUnavailable
from relaygr_stream.ops.looking import REQUESTS, look
from relaygr_stream.settings.schema import Kafka


@pytest.fixture
def mute() -> Iterator[str]:
    """The address of a port that accepts connections, and answers nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_work_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaygr_stream.ops.looking.FENCING_S", 0.0)
    ended: list[bool] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(BrokerUnavailable, match=r"localhost:9092 within 0\.3 s"):
        look(Kafka(request_timeout_ms=100), forever())
    assert ended


def test_what_the_work_returns_or_raises_is_passed_on() -> None:
    async def work(fails: bool) -> int:
        if fails:
            raise KeyError("x")
        return 7

    assert look(Kafka(), work(False)) == 7
    with pytest.raises(KeyError):
        look(Kafka(), work(True))


@pytest.mark.parametrize(
    "command",
    [["status"], ["topics", "verify"], ["topics", "show"], ["dead-letters", "list"], ["explain", "--seconds", "1"]],
    ids=" ".join,
)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # a constant from the next release on
def test_a_mute_broker_holds_up_no_command(command: list[str], mute: str) -> None:
    timeout_ms = 500
    options = ["--bootstrap", mute, "--set", f"kafka.request_timeout_ms={timeout_ms}"]
    began = time.monotonic()
    done = CliRunner().invoke(main, [*command, *options])
    assert done.exit_code == 1
    assert isinstance(done.exception, BrokerUnavailable | SystemExit), done.exception
    assert time.monotonic() - began < 60 + REQUESTS * timeout_ms / 1e3, "a bound against hanging"
