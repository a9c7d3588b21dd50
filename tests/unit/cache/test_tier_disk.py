"""A tier's file on a disk that loses what is written, or does not give it: nothing else than was written is served."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from relaygr_stream.cache.copy import CopyEngine
from relaygr_stream.cache.entry import Coverage, Entry
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.cache.tier_file import TierFile, Until
from relaygr_stream.cache.transit import Lease, Reservation
from relaygr_stream.errors import DeviceError
from tests import needs
from tests.faults.disk import HINT, FailingDisk, failing_disk, permitted
from tests.unit.cache.worlds import CPU, compute, entries, file_of, holds, make, sequence
from tests.waiting import until_blocking

DRAM = 40
USERS = 6


class World(NamedTuple):
    """A cache whose first users are in DRAM alone: its HBM has room for three."""

    cache: PrefixCache
    file: TierFile
    disk: FailingDisk

    def forget(self, *, slots: bool = False) -> None:
        """The pages of its data leave memory. slots: those in front of them, too."""
        self.file._map.madvise(mmap.MADV_DONTNEED, 0 if slots else self.file.shape.data_at)
        with self.file.path.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0 if slots else self.file.shape.data_at, 0, os.POSIX_FADV_DONTNEED)

    def away(self) -> Entry:
        """An entry that is in DRAM alone."""
        return next(entry for entry in entries(self.cache) if entry.region is None)

    def loaded(self, entry: Entry) -> None:
        assert self.cache.load(entry)
        until_blocking(lambda: entry in self.cache.poll(), "the entry's load has ended")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    if not permitted():
        needs.without(HINT)
    with failing_disk(tmp_path / "disk") as disk:
        file = file_of(tmp_path / "disk" / "f", DRAM)
        cache = make(9, DRAM, CopyEngine(CPU), file=file)
        for user in range(USERS):
            compute(cache, user, 70)
            until_blocking(lambda: not (cache.poll() or cache.copying), "the copies are made")
        yield World(cache, file, disk)
        if file.whole:
            file.close()


def test_what_was_written_is_served(world: World) -> None:
    entry = world.away()
    world.file.sync()
    world.forget()
    world.loaded(entry)
    assert entry.region is not None
    assert holds(entry.region, sequence(int(entry.user_id[1:]), 0, 70))


def test_a_disk_that_loses_what_is_written_ends_the_worker_before_it_serves_other_bytes(world: World) -> None:
    entry = world.away()
    world.disk.refuse_writes()
    world.forget()
    with pytest.raises(DeviceError, match=r"disk of .* did not take what was written \(.+\); name a folder on another"):
        world.loaded(entry)


def test_what_a_disk_does_not_give_is_computed_again(world: World) -> None:
    entry = world.away()
    world.file.sync()
    world.disk.refuse_reads()
    world.forget()
    world.loaded(entry)
    assert entry.failed
    assert world.cache.counters.copy_failures == 1
    compute(world.cache, int(entry.user_id[1:]), 70)
    world.cache.check_integrity()


def test_what_a_disk_does_not_give_is_not_lent_nor_filled(world: World) -> None:
    lease = world.cache.transit.lend(world.away().user_id)
    place = world.cache.transit.reserve("another", sequence(USERS, 0, 70), 128)
    assert isinstance(lease, Lease)
    assert isinstance(place, Reservation)
    place.data.fill_(3)
    world.file.sync()
    world.disk.refuse_reads()
    world.forget()
    for each in (lease, place):
        with pytest.raises(DeviceError, match="does not give what was written"):
            each.fetch()


def test_an_erasure_that_does_not_reach_the_disk_is_none(world: World) -> None:
    world.file.sync()
    world.disk.refuse_reads()
    world.forget()
    with pytest.raises(DeviceError, match="does not give what was written"):
        world.cache.erase_users({world.away().user_id})


@pytest.mark.parametrize("what", ["asked for", "offered"])
def test_a_sequence_that_the_disk_does_not_give_after_a_restart_is_computed_again(world: World, what: str) -> None:
    user = int(world.away().user_id[1:])
    world.file.sync()
    world.file.close()
    file = file_of(world.file.path, DRAM)
    cache = make(9, DRAM, CopyEngine(CPU), file=file)
    assert cache.restore().entries
    world.disk.refuse_reads()
    World(cache, file, world.disk).forget()
    world.forget()
    if what == "asked for":
        assert cache.find(f"u{user}", sequence(user, 0, 70)) == (None, Coverage.NONE)
    else:
        assert isinstance(cache.transit.reserve(f"u{user}", sequence(user, 0, 70), 128), Reservation)
    assert cache.counters.copy_failures == 1
    cache.check_integrity()
    file.close()


@pytest.mark.parametrize("what", ["evicted", "erased", "made", "dated"])
def test_a_slot_that_the_disk_does_not_give_ends_the_worker_with_its_reason(world: World, what: str) -> None:
    user, transit, wanted = world.away().user_id, world.cache.transit, (sequence(USERS, 0, 70), 128)
    place = transit.reserve("another", *wanted)  # of blocks that were never written nothing is read
    assert isinstance(place, Reservation)
    transit.discard(place)
    world.file.until = Until(1, 1)
    world.file.sync()
    world.disk.refuse_reads()
    world.forget(slots=True)
    does: dict[str, Callable[[], object]] = {
        "evicted": lambda: world.cache.evict_user(user),
        "erased": lambda: world.cache.erase_users({user}),
        "made": lambda: transit.reserve("another", *wanted),
        "dated": lambda: setattr(world.file, "until", Until(1, 2)),
    }
    with pytest.raises(DeviceError, match=r"disk of .* did not take what was written \(.+\); name a folder on another"):
        does[what]()


def test_a_file_whose_slots_the_disk_does_not_give_is_not_opened(world: World) -> None:
    world.file.sync()
    world.file.close()
    world.disk.refuse_reads()
    world.forget(slots=True)
    with pytest.raises(DeviceError, match="does not give what was written"):
        file_of(world.file.path, DRAM)
