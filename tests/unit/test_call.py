"""Which of a call's copies' answers ends it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from relaygr_stream.client.answers import Call
from relaygr_stream.wire.messages import Status
from tests.unit.client_peers import request, scored


@pytest.mark.parametrize("status", ["rejected", "overloaded", "deadline_exceeded", "failed"])
async def test_scores_of_another_copy_count_more_than_what_the_first_worker_says(status: Status) -> None:
    """While limits or models change, one worker rejects what another one scores."""
    scores = scored(request())
    refused = msgspec.structs.replace(scores, status=status, scores=b"")
    call = Call(b"c", "r", asyncio.get_running_loop().create_future(), attempts=2)
    call.on_reply(refused)
    assert not call.reply.done()
    call.on_reply(scores)
    assert call.reply.result() is scores
    alone = Call(b"c", "r", asyncio.get_running_loop().create_future(), attempts=1)
    alone.on_reply(refused)
    assert alone.reply.result() is refused
