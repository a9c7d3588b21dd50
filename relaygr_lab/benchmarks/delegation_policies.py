"""A `relaygr` process with another way of choosing delegates than the one that serves, for benchmarks/delegation.py.

    python relaygr_lab/benchmarks/delegation_policies.py POLICY worker|trigger …     as `relaygr worker|trigger …`

- two: as it serves: the sooner of two at random among those with stated room;
- stated: the soonest of all with stated room;
- tried: any worker at random, whatever it states. One that would be late by its own, exact books refuses: it passes the
  signal on to another at random, three in all, and tells the owner (as P/D-Serve forwards upon rejection).
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any, Final

import relaygr_stream.trigger.service as trigger_service
from relaygr_stream.__main__ import run
from relaygr_stream.engine.commands import DELEGATED_LANE, Prefill, Query
from relaygr_stream.errors import BrokerError
from relaygr_stream.fleet import TRAVEL_MS
from relaygr_stream.trigger.delegation import Delegation, Place
from relaygr_stream.wire.records import HEADER_KIND, KIND_DELEGATED, Record
from relaygr_stream.wire.refusals import KIND, Refusal, encode_refusals
from relaygr_stream.wire.topic_files import lane_of
from relaygr_stream.worker.effects import Done, Effects, Submit
from relaygr_stream.worker.forwarding import IN_TIME_SHARES
from relaygr_stream.worker.requests import Requests

MOST_TRIES: Final = 3
HEADER_TRIES: Final = "bench-tries"
POLICIES: Final = ("two", "stated", "tried")


class Stated(Delegation):
    """The soonest of all that state room."""

    def choose(self, found: list[tuple[float, Place]]) -> Place | None:
        return min(found)[1] if found else None


class Tried(Delegation):
    """Any other worker."""

    def ready_ms(self, *_: object) -> float | None:
        return 0.0

    def choose(self, found: list[tuple[float, Place]]) -> Place | None:
        return random.choice(found)[1] if found else None


def refuse_what_is_late() -> None:
    """Workers look at their own books before they take a delegated signal, and pass it on where it would be late."""
    as_served, other_as_served = Requests._signal, Requests._other

    def signal(requests: Any, record: Record, suspect: bool) -> Effects:
        effects = Effects()
        for effect in as_served(requests, record, suspect):
            command = effect.command if isinstance(effect, Submit) else None
            if isinstance(command, Prefill) and command.task.lane == DELEGATED_LANE:
                requests._context.background.start(try_here(requests, record, command))
            else:
                effects.append(effect)
        return effects

    def other(requests: Any, record: Record, kind: str, ranked: bool, suspect: bool) -> Effects:
        if kind == KIND and ranked:
            return [*requests._notice(record), Done(record)]  # where a signal came to in the end
        return other_as_served(requests, record, kind, ranked, suspect)

    Requests._signal, Requests._other = signal, other  # type: ignore[method-assign, assignment]


async def try_here(requests: Any, record: Record, taken: Prefill) -> None:
    task, now = taken.task, asyncio.get_running_loop().time()
    tries = int(dict(record.headers).get(HEADER_TRIES) or b"1")
    books = await requests._device.ask(Query())
    name, peers = requests._context.name, requests._core._forwarding._peers
    cost_ms = peers.workers()[name].costs.pre_infer_ms(len(task.tokens))
    left_ms = (task.due - now) * 1e3
    if books.pre_infer_waiting_ms + books.queue_ms + cost_ms <= IN_TIME_SHARES[0] * (left_ms + cost_ms) - TRAVEL_MS:
        requests._device.submit(taken)
        return
    topics, lanes = requests._topics, requests._topics.lanes
    home = lane_of(task.user_id, lanes)
    owner = peers.owner(home)
    been = {name, "" if owner is None else owner.worker.name}
    others = [status for status in peers.workers().values() if status.name not in been and status.lanes]
    to = ""
    headers = [(HEADER_KIND, KIND_DELEGATED.encode()), (HEADER_TRIES, str(tries + 1).encode())]
    try:
        if others and tries < MOST_TRIES:
            status = random.choice(others)
            to, lane = status.name, random.choice(status.lanes).lane
            await requests.outbox._others.send_and_wait(
                topics.ranking.name, record.value, key=record.key, partition=lane, headers=headers
            )
        told = encode_refusals([Refusal(task.request_id, "delegated", task.tenant, to or "nobody")])
        await requests.outbox._others.send_and_wait(
            topics.ranking.name, told, partition=home, headers=[(HEADER_KIND, KIND.encode())]
        )
    except BrokerError:
        pass


if __name__ == "__main__":
    policy = sys.argv.pop(1)
    vars(trigger_service)["Delegation"] = {"two": Delegation, "stated": Stated, "tried": Tried}[policy]
    if policy == "tried":
        refuse_what_is_late()
    run()
