"""Tenants share nothing, whatever their users and requests are called: not an entry, a pin, an outcome or a signal."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relaygr_stream.settings.schema import Kafka, Relay
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import PreInferSignal, RequestEvent, split_tenant_key, tenant_key
from relaygr_stream.wire.topic_files import lane_of
from tests.properties import examples
from tests.unit.client_peers import client_on, responder_on
from tests.unit.client_peers import event as an_event
from tests.unit.client_peers import request as a_request
from tests.unit.engine.worlds import GRANULE_BYTES, LIMITS, World, world
from tests.unit.handover.peers import ALL, peers
from tests.unit.trigger.parts import event
from tests.unit.trigger.processes import peer_on, trigger_on
from tests.unit.worker.services import Peer, worker_on, worker_settings
from tests.waiting import until

tenants = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=4)
ids = st.text(st.sampled_from("ab\0"), min_size=1, max_size=4)

#: What a tenant may do: kind, number of the request, length of the history.
Step = tuple[Literal["signal", "rank"], int, int]
steps = st.tuples(st.sampled_from(["signal", "rank"]), st.integers(0, 2), st.sampled_from([20, 64, 100, 150]))


@given(tenants, ids, tenants, ids)
def test_no_two_tenants_or_ids_have_one_key(tenant: str, of: str, other_tenant: str, other: str) -> None:
    same = (tenant, of) == (other_tenant, other)
    assert (tenant_key(tenant, of) == tenant_key(other_tenant, other)) == same
    assert split_tenant_key(tenant_key(tenant, of)) == (tenant, of)


def play(shared: World, step: Step, tenant: str) -> None:
    kind, number, length = step
    if kind == "signal":
        shared.signal(f"r{number}", 1, length, tenant=tenant)
    else:
        shared.rank(f"r{number}", 1, length, tenant=tenant)
    shared.settle()


def outcomes(shared: World, tenant: str) -> list[tuple[str | None, int]]:
    """What a client of the tenant gets to know of the cache."""
    return [(a.measured.outcome, a.measured.computed_tokens) for a in shared.answers if a.task.tenant == tenant]


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["", "a"]), steps), min_size=1, max_size=12))
@example([("a", ("rank", 0, 100)), ("", ("rank", 0, 100))])
@example([("a", ("signal", 0, 100)), ("", ("rank", 0, 20)), ("a", ("signal", 1, 100)), ("a", ("rank", 0, 100))])
@example(
    [
        ("", ("signal", 2, 20)),
        ("a", ("signal", 0, 20)),
        ("", ("signal", 0, 100)),
        ("", ("signal", 1, 150)),
        ("", ("rank", 0, 150)),
    ]
)
def test_a_tenant_gets_what_it_would_get_alone(done: list[tuple[str, Step]]) -> None:
    """Two tenants with one user and the same request ids, in memory enough for both."""
    enough = partial(world, hbm=30, dram=30, limits=replace(LIMITS, pinned_bytes=30 * GRANULE_BYTES))
    with enough() as shared:
        for tenant, step in done:
            play(shared, step, tenant)
        for tenant in ("", "a"):
            with world(hbm=30, dram=30) as alone:
                for who, step in done:
                    if who == tenant:
                        play(alone, step, tenant)
                assert outcomes(shared, tenant) == outcomes(alone, tenant)


async def test_a_worker_tells_a_tenant_nothing_of_anothers_user(embedded_settings: Kafka) -> None:
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)):

        async def ask(tenant: str) -> tuple[str | None, int]:
            reply = await peer.reply(await peer.rank("r", "alice", 100, tenant=tenant))
            assert reply.request_id == "r"
            return reply.outcome, reply.timings.computed_tokens

        assert await ask("shop") == ("full", 100)
        assert await ask("shop") == ("hbm", 0)
        assert await ask("spy") == ("full", 100)
        assert await ask("") == ("full", 100)
        assert await ask("shop") == ("hbm", 0)
        # One request id of two tenants: neither signal is the other's duplicate, nor was either ranked.
        for tenant in ("shop", "spy"):
            await peer.signal("announced", "bob", 80, tenant=tenant)
        await until(lambda: peer.statuses[-1].counters.get("signal_computed") == 2)


async def test_a_trigger_admits_one_request_id_of_two_tenants(embedded_settings: Kafka) -> None:
    async with (
        peer_on(embedded_settings) as peer,
        trigger_on(embedded_settings, relay=Relay(life_window_ms=60_000)) as trigger,
    ):
        for tenant in ("shop", "spy", "shop"):
            await peer.publish(event(25, "r", "alice", tenant=tenant))
        await until(lambda: trigger.decided == 3)
        assert trigger.decisions("duplicate") == 1
        await until(lambda: len(peer.signals) == 2)
        assert [decode(PreInferSignal, record.value).tenant for record in peer.signals] == ["shop", "spy"]
        assert {record.lane for record in peer.signals} == {lane_of("alice", peer.topics.lanes)}


async def test_what_is_handed_over_stays_its_tenants() -> None:
    async with peers() as (old, new):
        await old.rank(1, 150, tenant="shop")
        new.handover.lanes_changed(ALL, ())
        await until(lambda: new.total("entries", way="taken") == 7)  # the world's own users, 0 to 5, and this one
        await new.at_rest()
        assert tenant_key("shop", "u1") in await new.users()
        assert (await new.rank(1, 150, tenant="shop")).measured.outcome == "dram"
        assert (await new.rank(1, 150, tenant="spy")).measured.outcome == "full"


async def test_a_client_states_its_tenant_where_a_request_does_not(embedded_settings: Kafka) -> None:
    async with responder_on(embedded_settings) as peer, client_on(embedded_settings, tenant="shop") as relay:
        await relay.announce(an_event())
        await relay.rank(a_request(), timeout=20.0)
        await relay.rank(msgspec.structs.replace(a_request(1), tenant="own"), timeout=20.0)
        assert [sent.tenant for _, sent in peer.requests] == ["shop", "own"]
        await until(lambda: len(peer.events) == 1)
        assert decode(RequestEvent, peer.events[0].value).tenant == "shop"
