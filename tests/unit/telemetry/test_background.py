"""Background work: the first failure is raised where the process waits, and nothing is left running."""

from __future__ import annotations

import asyncio
import gc
from itertools import islice

import pytest
from structlog.testing import capture_logs

from relaygr_stream.errors import BrokerError
from relaygr_stream.telemetry.background import Background, endless, periodically
from tests.waiting import WITHIN_S


async def forever() -> None:
    await asyncio.Event().wait()


async def fails(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


async def result() -> str:
    return "done"


async def test_what_is_waited_for_is_returned_while_nothing_fails() -> None:
    background = Background()
    task = background.start(forever())
    assert await background.until(result()) == "done"
    background.check()
    await background.end()
    assert task.cancelled()
    background.check()  # a cancellation is no failure


async def test_the_first_failure_is_raised_and_what_was_waited_for_is_cancelled() -> None:
    background, ended = Background(), asyncio.Event()

    async def work() -> None:
        try:
            await forever()
        finally:
            ended.set()

    background.start(fails(KeyError("first")))
    with pytest.raises(KeyError, match="first"):
        await asyncio.wait_for(background.until(work()), WITHIN_S)
    background.fail(ValueError("second"))
    with pytest.raises(KeyError, match="first"):
        background.check()
    await asyncio.wait_for(ended.wait(), WITHIN_S)


async def test_the_failure_of_a_future_that_others_own_is_one() -> None:
    background = Background()
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    background.watch(future)
    future.set_exception(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        await asyncio.wait_for(background.until(forever()), WITHIN_S)


async def test_ending_waits_until_all_has_ended() -> None:
    background, ended = Background(), False

    async def slow_to_end() -> None:
        nonlocal ended
        try:
            await forever()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            ended = True

    background.start(slow_to_end())
    await asyncio.sleep(0)
    await background.end()
    assert ended


async def test_a_failure_that_nobody_looks_at_is_no_warning() -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    background = Background()
    background.start(fails(KeyError("first")))
    await asyncio.wait({background.failed})
    del background
    gc.collect()
    assert told == []


async def test_what_is_done_periodically_skips_what_passes_and_fails_with_what_does_not() -> None:
    errors: list[Exception | None] = [None, BrokerError("no broker"), TimeoutError(), None, KeyError("a defect"), None]

    async def work() -> None:
        if (error := errors.pop(0)) is not None:
            raise error

    with capture_logs() as logs, pytest.raises(KeyError, match="a defect"):
        await periodically(0.0, work, "ask a broker", (BrokerError, TimeoutError))
    assert errors == [None]
    assert [(line["event"], line["error"]) for line in logs] == [
        ("cannot ask a broker now", "no broker"),
        ("cannot ask a broker now", "TimeoutError"),
    ]


def test_the_last_pause_repeats() -> None:
    assert list(islice(endless((0.1, 0.2, 2.0)), 5)) == [0.1, 0.2, 2.0, 2.0, 2.0]
