"""A trigger drops what it remembers of a user who is erased, of nobody else, and says so."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from relaygr_stream.bus.ages import AgeBounds, SenderLag
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.ops.erase import erase_from_fleet
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.settings.worker import Handover
from relaygr_stream.trigger import sent, service
from relaygr_stream.trigger.core import TriggerCore
from relaygr_stream.trigger.intake import EventIntake
from relaygr_stream.trigger.lane import LaneTrigger
from relaygr_stream.trigger.metrics import TriggerTelemetry
from relaygr_stream.trigger.sent import KeptAt, SentBooks
from relaygr_stream.trigger.service import trigger_core
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.erase import Erase, user_mark
from relaygr_stream.wire.messages import tenant_key
from relaygr_stream.wire.records import Record
from tests.done import DoneRecords
from tests.unit.trigger.parts import POLICY, event, lane_status, worker_status
from tests.unit.trigger.processes import peer_on, trigger_on
from tests.waiting import until


def core_with(*users: tuple[str, str]) -> TriggerCore:
    """A core that has admitted a request of each of these (tenant, user)."""
    owners = OwnerDirectory(3000.0, clock=lambda: 1.0)
    owners.take(worker_status(lane_status(budget=10**9)))
    core = TriggerCore(POLICY, owners)
    core.take_lane(0)
    for number, (tenant, user) in enumerate(users):
        decided = core.on_event(0, event(20, f"r{number}", user, tenant=tenant), 0.0, 1.0)
        assert decided.decision.reason == "admitted"
    return core


def test_what_is_remembered_of_a_user_goes_and_of_others_stays() -> None:
    core = core_with(("", "ann"), ("shop", "ann"), ("", "bob"))
    state = core.observe(0)
    assert sorted(set(core.users())) == sorted({"ann", tenant_key("shop", "ann"), "bob"})
    core.forget({"ann"})
    assert sorted(set(core.users())) == sorted({tenant_key("shop", "ann"), "bob"})
    assert core.sent.kept("ann") is None and core.sent.kept("bob") is not None
    assert not state.admitted_recently("r0", 1.0) and state.admitted_recently("r2", 1.0)


@pytest.mark.parametrize(("most", "users"), [("MOST_USERS", 3), ("MOST_CHARACTERS", 30)])
def test_the_memory_of_users_is_bounded_by_their_number_and_by_their_keys(
    monkeypatch: pytest.MonkeyPatch, most: str, users: int
) -> None:
    """A sender chooses the ids."""
    monkeypatch.setattr(sent, most, users)
    books = SentBooks()
    for number in [*range(10), 9]:
        books.remember(f"{number:010}", KeptAt("w", 1, delegated=False))
    assert books.users == [f"{number:010}" for number in (7, 8, 9)]
    for user in books.users:
        books.forget(user)
    books.remember("0" * 9, KeptAt("w", 1, delegated=False))
    assert books.users == ["0" * 9]


async def test_waiting_events_of_the_user_are_completed_undecided() -> None:
    done, mark = DoneRecords(), "0123456789abcdef"
    nothing: Any = SimpleNamespace()
    core = TriggerCore(POLICY, OwnerDirectory(3000.0))
    intake = EventIntake(nothing, nothing, nothing, done)
    lane = LaneTrigger(0, core, intake, nothing, AgeBounds(SenderLag()), TriggerTelemetry(nothing))
    values = [
        (b"ann", encode(event(20, user_id="ann"))),
        (b"bob", encode(event(20, user_id="bob"))),
        (b"ann", encode(event(20, user_id="ann", tenant="shop"))),
        (b"another key", encode(event(20, user_id="ann"))),
        (b"ann", b"\xc1"),  # would be dead-lettered with its key
        (b"bob", b"\xc1"),
    ] * 100  # more than are compared at once
    for offset, (key, value) in enumerate(values):
        lane.put(Record("retrieval", 0, offset, 0, key, value, ()))
    erasing = asyncio.create_task(lane.erase(Erase(id=mark, user=user_mark(mark, "ann"), sent_ms=1)))
    await asyncio.sleep(0)
    lane.put(Record("retrieval", 0, 10**6, 0, b"bob", values[1][1], ()))  # comes meanwhile
    await erasing
    assert [record.offset for record in done] == [offset for offset in range(600) if offset % 6 in (0, 3, 4)]
    assert lane.backlog == 301
    alone = LaneTrigger(0, core, intake, nothing, AgeBounds(SenderLag()), TriggerTelemetry(nothing))
    for _, record in lane._events:
        alone.put(record)
    assert lane.backlog_bytes == alone.backlog_bytes


@pytest.mark.stack
async def test_a_trigger_confirms_only_what_it_can_carry_out(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores: list[TriggerCore] = []

    def noted(*parts: Any) -> TriggerCore:
        cores.append(trigger_core(*parts))
        return cores[-1]

    monkeypatch.setattr(service, "trigger_core", noted)
    monkeypatch.setattr("relaygr_stream.ops.erase.LISTEN_S", 6.0)  # on a busy machine a trigger states itself late
    async with peer_on(embedded_settings) as peer:
        settings = Settings(kafka=embedded_settings)
        async with trigger_on(embedded_settings) as trigger:
            await peer.publish(event(100, "r", "ann"))
            await peer.publish(event(100, "r2", "bob"))
            await until(lambda: trigger.decisions("admitted") == 2)
            assert set(cores[0].users()) == {"ann", "bob"}
            peer.stating = False  # a worker that never confirms would be waited for
            done = await erase_from_fleet(settings, "ann", "", 20.0)
            assert len(done.triggers) == 1 and not done.triggers_unconfirmed
            assert set(cores[0].users()) == {"bob"}
            # This command names the user by a secret that the trigger has not.
            signed = Settings(kafka=embedded_settings, handover=Handover(secret="a secret of sixteen characters"))
            refused = await erase_from_fleet(signed, "bob", "", 0.0)
            assert set(cores[0].users()) == {"bob"}
            assert not refused.triggers and not refused.complete
