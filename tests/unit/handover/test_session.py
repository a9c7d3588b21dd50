"""Two workers' caches on their own device threads, over a real connection: what is handed over, and what never is."""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict, deque
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from relaygr_stream.cache.transit import Transit
from relaygr_stream.engine.scheduler import Scheduler
from relaygr_stream.handover import service
from relaygr_stream.handover.connection import connect
from relaygr_stream.handover.pace import CopyPace
from relaygr_stream.handover.service import advertised_host
from relaygr_stream.handover.session import AHEAD, SessionProgress, Taker
from relaygr_stream.handover.wire import Ask, End, Enough, Offer, SessionRefused, SkipOffer, Take
from relaygr_stream.settings.worker import Handover as HandoverSettings
from relaygr_stream.wire.topic_files import lane_of
from tests.statuses import SECRET_CHANGE, lane_statuses
from tests.unit.cache.worlds import entries, table_of
from tests.unit.engine.worlds import history
from tests.unit.handover.peers import (
    ALL,
    LANES,
    NETWORKS,
    RawChannel,
    connected,
    credentials,
    giver,
    peers,
    status,
)
from tests.waiting import until


@pytest.mark.parametrize("in_files", [False, True])
async def test_users_of_moved_lanes_are_served_without_computing(in_files: bool, tmp_path: Path) -> None:
    folders = [tmp_path / name if in_files else None for name in ("old", "new")]
    for folder in filter(None, folders):
        folder.mkdir()
    async with peers({"folder": folders[0]}, folder=folders[1]) as (old, new):
        moved = frozenset(lane_of(f"u{user}", LANES) for user in (1, 2, 3))
        theirs = [user for user in range(6) if lane_of(f"u{user}", LANES) in moved]
        new.handover.lanes_changed(moved, ())
        await until(lambda: new.total("entries", way="taken") == len(theirs))
        await new.at_rest()
        assert await new.users() == {f"u{user}" for user in theirs}
        assert await old.users() == {f"u{user}" for user in range(6)}
        for user in theirs:
            answer = await new.rank(user, 60 + 20 * user)
            assert answer.measured.outcome == "dram"
            assert answer.measured.computed_tokens == 0
        new.world.answers = new.answers
        new.world.check_scores(1e-5)
        assert old.total("bytes", way="given") == new.total("bytes", way="taken") > 0


async def test_a_worker_that_knows_more_lanes_gets_the_users_of_its_own() -> None:
    """Workers learn of lanes one by one; the asking one has them."""
    async with peers() as (old, new):
        more = 4 * LANES
        new.handover._counted = SimpleNamespace(lanes=more)
        moved = frozenset(lane_of(f"u{user}", more) for user in (1, 2, 3))
        theirs = {user for user in await old.users() if lane_of(user, more) in moved}
        new.handover.lanes_changed(moved, ())
        await until(lambda: new.total("entries", way="taken") == len(theirs))
        await new.at_rest()
        assert await new.users() == theirs


async def test_scores_are_the_old_owners_bit_for_bit() -> None:
    async with peers() as (old, new):
        before = await old.rank(3, 120)
        new.handover.lanes_changed(ALL, ())
        await until(lambda: new.total("entries", way="taken") == 6)
        await new.at_rest()
        after = await new.rank(3, 120)
        assert before.scores is not None
        assert after.scores is not None
        assert after.measured.outcome == "dram"
        assert before.scores.tobytes() == after.scores.tobytes()


async def test_another_sequence_of_the_user_is_computed() -> None:
    async with peers() as (_, new):
        new.handover.lanes_changed(ALL, ())
        await until(lambda: new.total("entries", way="taken") == 6)
        new.thread.submit(new.ranking("other", 3, 120, version=1))
        await until(lambda: len(new.answers) == 1)
        assert new.answers[0].measured.outcome == "full"
        new.world.answers = new.answers
        new.world.check_scores()


async def test_another_secret_gets_nothing_and_says_so() -> None:
    async with peers(secret="another sixteen characters") as (old, new):
        new.handover.lanes_changed(ALL, ())
        await until(lambda: old.total("failed", way="given") > 0 and new.total("failed", way="taken") > 0)
        assert await new.users() == set()
        assert old.total("bytes", way="given") == 0


@pytest.mark.parametrize(("first", "second"), [*pairwise(SECRET_CHANGE), *pairwise(reversed(SECRET_CHANGE))])
async def test_while_the_secret_is_changed_prefix_kv_move(first: HandoverSettings, second: HandoverSettings) -> None:
    async with peers(first={"settings": first}, settings=second) as (old, new):
        new.handover.lanes_changed(ALL, ())
        await until(lambda: new.total("entries", way="taken") == 6)
        assert await new.users() == await old.users()


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"model_version": "other"}, "model version"), ({"dtype": "bfloat16"}, "dtype"), ({"device": "cuda"}, "device")],
)
async def test_what_would_not_serve_is_refused_in_words(changes: dict[str, Any], words: str) -> None:
    async with peers() as (old, new):
        channel = await connected(old)
        await channel.send(Ask(msgspec.structs.replace(new.identity, **changes), tuple(ALL)))
        refused = await channel.receive(SessionRefused, 1000)
        assert refused.reason.startswith(f"{words} is")
        await channel.close()
        assert old.total("failed", way="given") == 1


async def test_what_is_longer_than_the_receiver_takes_holds_nothing_up() -> None:
    async with peers(max_tokens=130) as (old, new):
        for _ in range(3):
            await old.rank(5, 160)  # the most valuable is offered first
        new.handover.lanes_changed(ALL, ())
        await until(lambda: new.total("seconds", way="taken") > 0)
        assert await new.users() == {f"u{user}" for user in range(6) if 60 + 20 * user <= 130}
        assert new.total("failed", way="taken") == old.total("failed", way="given") == 0


async def test_a_receiver_with_little_room_keeps_within_it_and_takes_the_best() -> None:
    async with peers(dram=3) as (old, new):
        for _ in range(3):
            await old.rank(2, 100)
        new.handover.lanes_changed(ALL, ())
        await until(lambda: new.total("declined", reason="full") > 0)
        await until(lambda: old.total("seconds", way="given") > 0)
        await new.at_rest()
        users = await new.users()
        assert "u2" in users, "it has the most uses, which the receiver cannot know by itself"
        assert len(users) < 6


async def test_what_the_receiver_has_by_the_time_it_has_come_does_not_count_as_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Transit, "fill", Transit.discard)  # as where the user's entry is as good by now
    async with peers() as (_, new):
        new.handover.lanes_changed(ALL, ())
        await until(lambda: new.total("declined", reason="held") == 6)
        await new.at_rest()
        assert new.total("entries", way="taken") == 0
        assert new.total("bytes", way="taken") > 0


async def test_a_taker_of_the_last_release_gets_each_copy_before_the_next_offer() -> None:
    async with peers() as (old, _):
        channel = await connected(old)
        await channel.send(Ask(old.identity, tuple(ALL)))
        taken = []
        while isinstance(offer := await channel.receive(Offer | End, 10**6), Offer):
            assert not offer.more
            await channel.send(Take())
            await channel.receive_copy(memoryview(bytearray(offer.nbytes)), CopyPace())
            taken.append(offer.user_id)
        assert len(taken) == old.total("entries", way="given") == 6
        await channel.close()


async def test_no_message_waits_for_the_acknowledgement_of_the_one_before() -> None:
    """Two offers in a row took 40 ms, as a system without traffic delays an acknowledgement."""
    async with peers() as (old, _):
        channel = await connected(old)
        assert channel._connection._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await channel.close()


@pytest.mark.parametrize("seed", range(12))
async def test_each_copy_becomes_the_entry_that_was_offered(seed: int) -> None:
    """Whatever is taken, declined or offered twice, by a giver of this release or the last; a copy has its number. The
    taker may lose its lanes meanwhile."""
    random = Random(seed)
    ahead, owned = seed % (AHEAD + 1), random.sample(range(LANES), LANES - 1)
    wanted, copies = set(owned), random.choice((1, 2, 3, 100))
    users = [f"u{random.randrange(12)}" for _ in range(random.randrange(1, 20))]
    sent: dict[str, set[int]] = defaultdict(set)

    async def give(channel: RawChannel) -> None:
        offers, waiting = iter([*enumerate(users), None]), deque[int]()
        over = False
        while True:
            while not over and len(waiting) <= ahead:
                if over := (offer := next(offers)) is None:
                    await channel.send(End())
                else:
                    number, user = offer
                    waiting.append(number)
                    await channel.send(
                        Offer.from_tokens(user, history(number, 64), 64, 64 * 256, more=len(waiting) <= ahead)
                    )
            if not waiting:
                return
            choice = await channel.receive(Take | SkipOffer | Enough, 100)
            if isinstance(choice, Enough):
                return
            if isinstance(choice, Take):
                sent[users[waiting[0]]].add(waiting[0])
                data = memoryview(bytes([waiting[0]]) * 64 * 256)
                await channel.send_copy(data, CopyPace())
                if sum(map(len, sent.values())) == copies:
                    wanted.clear()
            waiting.popleft()

    async with peers(dram=random.choice((3, 30))) as (_, new), giver(give, "raw") as address:
        channel = await connect(address, "raw", credentials("new"), NETWORKS)
        progress = SessionProgress()
        await new.taker().take(channel, ALL, wanted, progress)
        await channel.close()
        await new.at_rest()
        found = await new.on_core(first_bytes)
        assert len(found) <= progress.entries
        assert all(number in sent[user] for user, number in found.items())
        assert all(lane_of(user, LANES) in owned for user in found)


def first_bytes(core: Scheduler) -> dict[str, int]:
    """Of each user's copy in DRAM; all its bytes are the same."""
    dram, found = table_of(core.cache).dram, {}
    assert dram is not None
    for entry in entries(core.cache):
        if entry.stored is not None:
            (found[entry.user_id],) = set(dram.view(entry.stored).tolist())
    return found


async def test_a_session_broken_off_leaves_the_books_balanced_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "ASK_FOR_S", 60.0)
    # At 50 kB/s there is a middle: 60 tokens have 16 KiB.
    async with peers(first={"rate": 50_000 / 2**20}) as (old, new):
        new.handover.lanes_changed(ALL, ())
        await until(lambda: new.total("bytes", way="taken") > 0)
        await old.handover.stop()
        await until(lambda: new.total("failed", way="taken") == 1)
        await old.handover.start()
        new.known["old"] = status(old)
        await until(lambda: new.total("entries", way="taken") >= 6)


async def test_a_defect_in_a_session_is_told_and_ends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with peers() as (_, new):
        with capture_logs() as logs, monkeypatch.context() as broken:
            broken.setattr(Taker, "take", lambda *_: 1 / 0)
            new.handover.lanes_changed(ALL, ())
            await until(lambda: new.total("failed", way="taken") == 1)
        assert [line["event"] for line in logs if line["log_level"] == "error"] == ["hand-over failed by a defect"]
        assert not new.handover.failed.done()
        assert (await new.rank(1, 80)).measured.outcome == "full"


async def test_lanes_lost_again_are_not_fetched_further() -> None:
    # At 50 kB/s two of the copies have to wait: not all of them go in the first burst of 128 KiB.
    async with peers(first={"rate": 50_000 / 2**20}) as (_, new):
        new.handover.lanes_changed(ALL, ())
        await until(lambda: new.total("bytes", way="taken") > 0, "fetching")
        new.handover.lanes_changed((), ALL)
        await until(lambda: new.total("seconds", way="taken") > 0, "over")
        assert 0 < len(await new.users()) < 6
        assert new.total("failed", way="taken") == 0


async def test_who_leaves_waits_until_all_was_fetched() -> None:
    async with peers() as (old, new):
        old.known = {"new": status(new), "old": status(old, "draining")}
        old.handover.leaving(ALL)
        leaving = asyncio.create_task(old.handover.farewell(20.0))
        await asyncio.sleep(0.1)
        assert not leaving.done()
        new.handover.lanes_changed(ALL, ())
        await leaving  # the last bytes are on their way: the giver may go before the taker has counted them
        await until(lambda: new.total("entries", way="taken") == 6)
        assert old.total("entries", way="given") == 6


async def test_who_leaves_waits_for_one_that_starts_and_for_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has lanes only when it serves, and the group may need longer for that than who has them to ask."""
    monkeypatch.setattr(service, "ASK_FOR_S", 0.2)
    async with peers() as (old, new):
        old.known = {"new": status(new, "starting")}
        old.handover.leaving(ALL)
        leaving = asyncio.create_task(old.handover.farewell(60.0))
        await asyncio.sleep(0.5)
        assert not leaving.done()
        old.known = {"new": msgspec.structs.replace(status(new), lanes=lane_statuses(ALL))}
        new.handover.lanes_changed(ALL, ())
        await leaving
        await until(lambda: new.total("entries", way="taken") == 6)


async def test_who_leaves_does_not_wait_for_owners_that_do_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ASK_FOR_S", 0.2)
    async with peers() as (old, new):
        owner = msgspec.structs.replace(status(new), lanes=lane_statuses(ALL), name="without", handover="")
        old.known = {"new": status(new), "without": owner}
        old.handover.leaving(ALL)
        async with asyncio.timeout(30):
            await old.handover.farewell(1e6)
        assert old.total("entries", way="given") == 0


async def test_who_leaves_finishes_what_it_gives_of_lanes_that_it_lost_before() -> None:
    async with peers(first={"rate": 100_000 / 2**20}) as (old, new):
        new.handover.lanes_changed(ALL, ())
        await until(lambda: new.total("bytes", way="taken") > 0)
        await old.handover.farewell(60.0)
        await until(lambda: new.total("entries", way="taken") == 6)


@pytest.mark.parametrize("state", ["draining", "stopped", "nobody"])
async def test_who_leaves_last_waits_for_nobody(state: str) -> None:
    async with peers() as (old, new):
        old.known = {} if state == "nobody" else {"new": status(new, state)}
        old.handover.leaving(ALL)
        with pytest.raises(StopIteration):  # it ends without having waited for anything
            old.handover.farewell(60.0).send(None)


async def test_an_address_that_is_none_does_no_harm() -> None:
    async with peers() as (old, new):
        for name, address in (("a", "nonsense"), ("b", "127.0.0.1:1"), ("c", "host:99999")):
            new.known[name] = msgspec.structs.replace(status(old, address=address), name=name)
        new.handover.lanes_changed(ALL, ())
        await until(lambda: new.total("entries", way="taken") == 6)


def test_the_address_that_others_get() -> None:
    assert advertised_host(HandoverSettings()) == "127.0.0.1"
    assert advertised_host(HandoverSettings(host="10.0.0.7")) == "10.0.0.7"
    assert advertised_host(HandoverSettings(host="0.0.0.0", advertise="pod-1")) == "pod-1"
    assert advertised_host(HandoverSettings(host="0.0.0.0")) not in ("", "0.0.0.0")
