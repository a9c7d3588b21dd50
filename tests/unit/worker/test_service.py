"""The worker process as a whole, on a real broker: what it pins, answers, commits and states."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from relaygr_stream.bus.ages import LogEnd, stated_age_ms
from relaygr_stream.bus.producer import Producer
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import Cancel
from relaygr_stream.wire.records import HEADER_KIND, KIND_CANCEL
from relaygr_stream.wire.refusals import KIND as REFUSALS
from relaygr_stream.wire.refusals import Refusal, encode_refusals
from relaygr_stream.wire.worker_status import DELEGATED_PINNED
from relaygr_stream.worker import intake
from relaygr_stream.worker.intake import Intake
from tests.unit.worker.services import Peer, committed, worker_on, worker_settings
from tests.waiting import until


async def test_signals_are_pinned_rankings_answered_and_both_committed(kafka_settings: Kafka) -> None:
    async with Peer(kafka_settings) as peer, worker_on(worker_settings(kafka_settings)) as w:
        for number in range(6):
            await peer.signal(f"r{number}", f"u{number}", 50 + number)
        await until(lambda: peer.statuses and peer.statuses[-1].counters.get("signal_computed") == 6)
        sent = {number: await peer.rank(f"r{number}", f"u{number}", 50 + number) for number in range(6)}
        for number, correlation in sent.items():
            reply = await peer.reply(correlation)
            assert (reply.request_id, reply.status, reply.worker) == (f"r{number}", "ok", "w1")
            assert reply.outcome in ("hbm", "joined")
            assert reply.matrix().shape == (5, 2)
        await w.end()
        await until(lambda: peer.statuses[-1].state == "stopped")
        assert peer.statuses[-1].lanes == ()
        for topic in (peer.topics.pre_infer, peer.topics.ranking):
            assert await committed(kafka_settings, topic.name) == 6


async def test_gained_lanes_are_stated_at_once(embedded_settings: Kafka) -> None:
    settings = worker_settings(embedded_settings, status_interval_ms=3_600_000)
    async with Peer(embedded_settings) as peer, worker_on(settings):
        # Triggers count no other state.
        await until(lambda: any(len(each.lanes) == 8 and each.state == "serving" for each in peer.statuses))


async def test_an_offset_is_stated_only_once_its_signals_are_in_the_books(embedded_settings: Kafka) -> None:
    """Positions are taken before the question to the device thread; afterwards they would claim too much."""
    async with (
        Peer(embedded_settings) as peer,
        worker_on(worker_settings(embedded_settings, status_interval_ms=2)) as w,
    ):
        users = [f"u{number}" for number in range(24)]
        begun = len(peer.statuses)
        expected: dict[int, list[int]] = {}
        for number, user in enumerate(users):
            await peer.signal(f"r{number}", user, 100)
            expected.setdefault(peer.lane(user), []).append(w.runtime.cache.nbytes(100))
        await until(lambda: peer.statuses and peer.statuses[-1].counters["signals"] == len(users))
        for status in peer.statuses[begun:]:
            for stated in status.lanes:
                pinned = sum(expected.get(stated.lane, [])[: stated.pre_infer_offset])
                assert stated.pinned_bytes >= pinned, "stated as read, and not pinned"


async def test_an_answer_carries_what_the_trigger_decided(embedded_settings: Kafka) -> None:
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)):
        signalled = await peer.signal("r-in", "u1", 40)
        async with Producer(embedded_settings, client_id="trigger") as trigger:
            refused = encode_refusals([Refusal("r-out", "too_late"), Refusal("r-full", "over_load")])
            topic, headers = peer.topics.pre_infer.name, [("relaygr-kind", b"refusals")]
            for value in (refused, b"\xc1"):
                await trigger.send_and_wait(topic, value, partition=peer.lane("u1"), headers=headers)
        await until(lambda: position(peer, peer.lane("u1")) == signalled + 3)
        for request, admission in (("r-in", "admitted"), ("r-out", "too_late"), ("r-full", "over_load"), ("r", "")):
            reply = await peer.reply(await peer.rank(request, "u1", 40))
            assert (reply.status, reply.admission) == ("ok", admission)
        assert not peer.dead


@pytest.mark.parametrize(("share", "told"), [(0.5, 0), (1.0, 1)])
async def test_a_worker_without_room_for_other_workers_users_says_so_once(
    embedded_settings: Kafka, capsys: pytest.CaptureFixture[str], share: float, told: int
) -> None:
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings, pinned_share=share)):
        await until(lambda: peer.statuses)
    assert capsys.readouterr().err.count("no longest prefix is delegated") == told
    assert peer.statuses[-1].counters[DELEGATED_PINNED] == 0
    assert (peer.statuses[-1].delegated_bytes > 0) == (share < 1)


def position(peer: Peer, lane: int) -> int:
    """The lane's next pre-infer offset in the newest status; -1: that has no such lane."""
    lanes = (each for status in peer.statuses[-1:] for each in status.lanes)
    return next((each.pre_infer_offset for each in lanes if each.lane == lane), -1)


async def test_a_cancel_releases_in_its_order_and_a_broken_one_is_dead_lettered(embedded_settings: Kafka) -> None:
    kind = [(HEADER_KIND, KIND_CANCEL.encode())]
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)) as w:
        before = await committed(embedded_settings, peer.topics.ranking.name)
        await peer.signal("r", "u", 100)
        await until(lambda: any(lane.pinned_bytes for status in peer.statuses for lane in status.lanes), "pinned")
        await until(lambda: w.total("pre_infer_jobs") == 1, "computed")  # a cancel would cut it short
        await peer.send_ranking(b"\xc1", headers=kind)
        await peer.send_ranking(encode(Cancel(request_id="r")), headers=kind)
        await until(lambda: not any(lane.pinned_bytes for lane in peer.statuses[-1].lanes), "released")
        assert w.total("signals") == 2  # computed, cancelled
        assert w.total("records_skipped") == 0
        assert (await peer.reply(await peer.rank("r", "u", 100))).outcome == "hbm"
        await until(lambda: len(peer.dead) == 1, "dead-lettered")
    assert await committed(embedded_settings, peer.topics.ranking.name) == before + 3


async def test_a_worker_whose_clock_is_ahead_expires_nothing(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither rankings nor what its trigger says of them."""
    known: set[tuple[str, int]] = set()
    sample_ages = Intake.sample_ages

    def noted(self: Intake, topic: str, ends: Mapping[int, LogEnd]) -> None:
        sample_ages(self, topic, ends)
        known.update((topic, lane) for lane in ends)

    monkeypatch.setattr(Intake, "sample_ages", noted)
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)) as w:
        await until(lambda: len(known) == 2 * peer.topics.lanes, "the lanes' ends known")
        monkeypatch.setattr(intake, "stated_age_ms", lambda sent: (stated_age_ms(sent) or 0.0) + 300_000.0)
        refused = encode_refusals([Refusal(f"r{number}", "over_load") for number in range(5)])
        kind = [(HEADER_KIND, REFUSALS.encode())]
        pre_infer = peer.topics.pre_infer.name
        for lane in range(peer.topics.lanes):
            await peer.producer.send_and_wait(pre_infer, refused, partition=lane, headers=kind)
        await peer.signal("last", "u0", 20)
        await until(lambda: w.total("signals") == 1, "the signal read, and the refusals before it")
        correlations = [await peer.rank(f"r{number}", f"u{number}", 20, timeout_ms=5000.0) for number in range(5)]
        answers = [await peer.reply(each) for each in correlations]
        assert {answer.status for answer in answers} == {"ok"}
        assert answers[0].admission == "over_load"
        assert w.total("clock_clamped") == 1 + len(correlations), "the age of the signal and of each ranking"
