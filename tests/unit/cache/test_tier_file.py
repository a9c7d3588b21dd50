"""A tier's file: whose it is, what is taken of it, and what becomes of everything else."""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import pytest

from relaygr_stream.cache.arena import Extent
from relaygr_stream.cache.entry import Coverage, Entry
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.cache.tier_file import (
    HEADER_AT,
    MAGIC,
    MAX_KEY,
    PAGE,
    UNTIL_AT,
    FileShape,
    SlotRecord,
    TierFile,
    Until,
)
from relaygr_stream.cache.tier_file_open import open_tier_file
from relaygr_stream.cache.transit import Lease, Reservation
from relaygr_stream.errors import CapacityError, ConfigError, DeviceError
from relaygr_stream.wire.erase import Erase, user_mark
from tests.unit.cache.worlds import Flaky, compute, entries, file_of, holds, make, sequence, settle, write

DRAM = 40


def opened(path: Path) -> tuple[PrefixCache, Flaky, TierFile]:
    copier, file = Flaky(), file_of(path, DRAM)
    return make(9, DRAM, copier, file=file), copier, file


def filled(path: Path, users: int = 3, length: int = 70) -> bytes:
    """A file in which these users' entries are written down; its bytes."""
    cache, copier, file = opened(path)
    for user in range(users):
        compute(cache, user, length)
        settle(cache, copier)
    file.close()
    return path.read_bytes()


def reloaded(cache: PrefixCache, copier: Flaky, user: int) -> Entry:
    entry = cache.find(f"u{user}", sequence(user, 0, 70))[0]
    assert entry is not None
    assert cache.load(entry)
    settle(cache, copier)
    return entry


def test_a_restarted_process_finds_its_copies_and_serves_them(tmp_path: Path) -> None:
    filled(tmp_path / "f")
    cache, copier, file = opened(tmp_path / "f")
    assert file.holds
    assert cache.restore().entries == cache.counters.restored == 3
    assert cache.find("u1", sequence(1, 0, 70))[1] is Coverage.COVERS
    entry = reloaded(cache, copier, 1)
    assert entry.region is not None
    assert holds(entry.region, sequence(1, 0, 70))
    before = entry.tokens.array.copy()
    file.data[:] = 0  # what is in HBM does not read the file any more
    assert (entry.tokens.array == before).all()
    cache.check_integrity()


def test_what_grows_afterwards_is_written_down_too(tmp_path: Path) -> None:
    filled(tmp_path / "f")
    cache, copier, file = opened(tmp_path / "f")
    cache.restore()
    entry = cache.extend(reloaded(cache, copier, 1), sequence(1, 0, 150))
    assert entry is not None
    assert entry.region is not None
    write(entry.region, entry.tokens)
    cache.finish(entry)
    settle(cache, copier)
    file.close()
    again, copier, _ = opened(tmp_path / "f")
    assert again.restore().entries == 3
    assert again.find("u1", sequence(1, 0, 150))[1] is Coverage.COVERS


def test_a_damaged_copy_serves_nobody_and_is_not_lent(tmp_path: Path) -> None:
    filled(tmp_path / "f")
    cache, copier, file = opened(tmp_path / "f")
    cache.restore()
    for entry in entries(cache):
        assert entry.stored is not None
        file.data[entry.stored.extent.offset + 5] ^= 1
    assert reloaded(cache, copier, 0).failed
    assert cache.transit.lend("u1") == "soon"  # it is looked at first
    settle(cache, copier)
    assert cache.transit.lend("u1") == "never"
    assert cache.counters.damaged == 2
    cache.check_integrity()


def test_a_copy_is_lent_once_it_is_verified(tmp_path: Path) -> None:
    filled(tmp_path / "f")
    cache, copier, _ = opened(tmp_path / "f")
    cache.restore()
    assert cache.transit.lend("u1") == "soon"
    settle(cache, copier)
    assert isinstance(cache.transit.lend("u1"), Lease)


def test_what_another_worker_has_given_is_found_again(tmp_path: Path) -> None:
    cache, copier, file = opened(tmp_path / "f")
    place = cache.transit.reserve("u7", sequence(7, 0, 64), 64)
    assert isinstance(place, Reservation)
    place.data.fill_(3)
    assert cache.transit.fill(place)
    settle(cache, copier)
    file.close()
    again, _, _ = opened(tmp_path / "f")
    assert again.restore().entries == 1


def test_of_an_erased_user_nothing_stays_in_the_file(tmp_path: Path) -> None:
    cache, copier, file = opened(tmp_path / "f")
    user = 500_000_005  # a name that random bytes, such as a digest's, do not have
    compute(cache, user, 70)
    settle(cache, copier)
    tokens = sequence(user, 0, 70).array[0].tobytes()
    content = (tmp_path / "f").read_bytes()
    assert tokens in content
    assert f"u{user}".encode() in content
    cache.erase_users({f"u{user}"})
    content = (tmp_path / "f").read_bytes()
    assert tokens not in content
    assert f"u{user}".encode() not in content
    assert not any(content[file.shape.data_at :])


def test_a_user_erased_while_the_process_was_away_is_not_found(tmp_path: Path) -> None:
    filled(tmp_path / "f")
    cache, _, file = opened(tmp_path / "f")
    found = cache.restore([Erase(id="e", user=user_mark("e", "u1"), sent_ms=0)])
    assert (found.entries, found.dropped) == (2, {"erased": 1})
    assert sequence(1, 0, 70).array[0].tobytes() not in (tmp_path / "f").read_bytes()
    file.close()
    again, _, _ = opened(tmp_path / "f")
    assert again.restore().entries == 2


def test_an_erasure_that_a_kill_cut_short_is_done_at_the_next_start(tmp_path: Path) -> None:
    cache, copier, file = opened(tmp_path / "f")
    compute(cache, 5, 70)
    settle(cache, copier)
    file.clear = lambda *_: None  # type: ignore[method-assign]  # the kill: nothing is overwritten
    cache.erase_users({"u5"})
    file.close()
    again, _, _ = opened(tmp_path / "f")
    assert again.restore().dropped == {"incomplete": 1}
    assert sequence(5, 0, 70).array[0].tobytes() not in (tmp_path / "f").read_bytes()


def test_a_copy_that_arrives_after_its_user_was_erased_becomes_nothing() -> None:
    cache = make(9, DRAM)
    place = cache.transit.reserve("u7", sequence(7, 0, 64), 64)
    assert isinstance(place, Reservation)
    cache.erase_users(set(cache.transit.users()))
    assert not cache.transit.fill(place)
    assert cache.entries == 0
    assert cache.dram_used == 0


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda content: content[:-1], "bytes, "),
        (lambda content: content + b"x", "bytes, "),
        (lambda content: b"X" + content[1:], "damaged"),
        (lambda content: content[:HEADER_AT] + b"\xff" * 64 + content[HEADER_AT + 64 :], "damaged"),
        (lambda content: b"\xff" * len(content), "damaged"),
        (lambda content: bytes(PAGE) + content[PAGE:], "header is gone"),
    ],
)
def test_a_file_that_is_not_whole_is_dropped_and_made_anew(
    tmp_path: Path, spoil: Callable[[bytes], bytes], why: str
) -> None:
    path = tmp_path / "f"
    path.write_bytes(spoil(filled(path)))
    cache, _, file = opened(path)
    assert not file.holds
    assert why in file.dropped
    assert cache.restore().entries == 0
    assert sequence(1, 0, 70).array[0].tobytes() not in path.read_bytes()
    file.close()
    assert opened(path)[2].holds


def test_a_file_that_is_shortened_while_it_is_in_use_ends_the_worker_with_the_reason(tmp_path: Path) -> None:
    filled(tmp_path / "f")
    cache, _, file = opened(tmp_path / "f")
    cache.restore()
    compute(cache, 9, 70)
    os.truncate(tmp_path / "f", PAGE)
    with pytest.raises(DeviceError, match=f"was shortened to {PAGE} of its {file.shape.file_bytes} bytes"):
        cache.poll()
    os.truncate(tmp_path / "f", 0)
    file.until = Until(5, 5)  # by the event loop, which goes on for a moment: no bus error
    with pytest.raises(DeviceError, match="was shortened"):
        cache.close()


def test_a_file_of_another_shape_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "f"
    filled(path)
    file = file_of(path, DRAM, unit=5 * PAGE)
    assert not file.holds
    assert file.dropped


def test_a_file_of_another_model_is_dropped_and_the_reason_names_both(tmp_path: Path) -> None:
    path = tmp_path / "f"
    filled(path)
    file = file_of(path, DRAM, identity="model B")
    assert (file.holds, file.dropped) == (False, "it is of toy, this worker of model B")


def crafted(path: Path, **wrong: object) -> None:
    """A file with one record whose checksum is right and which no tier has written."""
    filled(path, users=0)
    file = file_of(path, DRAM)
    unit = file.shape.unit
    record = SlotRecord(Extent(0, unit), "u1", bytes(20), 64, 50, 1.0, 2)
    file.commit(record._replace(**wrong))  # type: ignore[arg-type]
    file.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"capacity": 0},
        {"capacity": 1 << 60},
        {"capacity": 63},
        {"capacity": 128},
        {"length": 0},
        {"length": 65},
        {"length": 1 << 63},
        {"uses": float("nan")},
        {"uses": float("inf")},
        {"uses": -1.0},
        {"source": 99},
        {"extent": Extent(0, PAGE)},
        {"extent": Extent(0, 1 << 40)},
        {"extent": Extent(0, 3 * PAGE + 8)},
    ],
)
def test_a_record_that_no_tier_writes_is_dropped(tmp_path: Path, wrong: dict[str, object]) -> None:
    crafted(tmp_path / "f", **wrong)
    cache, _, _ = opened(tmp_path / "f")
    found = cache.restore()
    assert found.entries == 0
    assert sum(found.dropped.values()) == 1
    cache.check_integrity()


def test_records_that_overlap_or_name_one_user_twice_give_one_entry(tmp_path: Path) -> None:
    path = tmp_path / "f"
    filled(path, users=0)
    file = file_of(path, DRAM)
    unit = file.shape.unit
    for index, user in enumerate(("u1", "u1", "u2")):
        file.commit(SlotRecord(Extent(index * unit, unit), user, bytes(20), 64, 50, 1.0, 2))
    second = Extent(3 * unit + PAGE, unit)
    file.commit(SlotRecord(second, "u3", bytes(20), 64, 50, 1.0, 2))
    file.commit(SlotRecord(Extent(4 * unit, unit), "u4", bytes(20), 64, 50, 1.0, 2))  # begins inside of it
    file.close()
    cache, _, _ = opened(path)
    found = cache.restore()
    assert (found.entries, found.dropped) == (3, {"unfit": 1, "overlapping": 1})
    cache.check_integrity()


def test_a_slot_in_another_ones_place_and_one_of_another_file_are_dropped(tmp_path: Path) -> None:
    path, other = tmp_path / "f", tmp_path / "other"
    content = bytearray(filled(path))
    theirs = filled(other)
    slots = range(PAGE, PAGE + 40 * 512, 512)
    used = [at for at in slots if any(content[at : at + 8])]
    empty = next(at for at in slots if not any(content[at : at + 8]))
    content[used[0] : used[0] + 512] = theirs[used[0] : used[0] + 512]
    content[empty : empty + 512] = content[used[1] : used[1] + 512]
    path.write_bytes(content)
    cache, _, _ = opened(path)
    found = cache.restore()
    assert (found.entries, found.dropped) == (2, {"damaged": 2})


def test_a_header_may_be_forged_and_nothing_happens(tmp_path: Path) -> None:
    """Its checksum is right, its numbers are absurd."""
    path = tmp_path / "f"
    content = bytearray(filled(path))
    fields = struct.pack("<QQQQ16sQ", 1 << 62, 1, 1 << 62, 0, bytes(16), 1 << 62) + b"x" * 9999
    content[HEADER_AT:PAGE] = fields[: PAGE - HEADER_AT]
    content[:HEADER_AT] = MAGIC + blake2b(bytes(content[HEADER_AT:UNTIL_AT]), digest_size=16).digest()
    path.write_bytes(content)
    assert not file_of(path, DRAM).holds


def test_a_user_whose_key_has_no_room_in_a_slot_is_not_kept(tmp_path: Path) -> None:
    file = file_of(tmp_path / "f", DRAM)
    record = SlotRecord(Extent(0, file.shape.unit), "é" * MAX_KEY, bytes(20), 64, 50, 1.0, 2)
    assert not file.commit(record)
    assert file.commit(record._replace(user_id="k" * MAX_KEY))


# ---- whose it is ----

SHAPE = FileShape(40 * PAGE, 3 * PAGE, 24, "toy")


def test_one_process_has_it(tmp_path: Path) -> None:
    first = open_tier_file(tmp_path / "f", SHAPE)
    assert first is not None
    program = f"""
        from pathlib import Path
        from relaygr_stream.cache.tier_file import FileShape
        from relaygr_stream.cache.tier_file_open import open_tier_file
        print(open_tier_file(Path({str(tmp_path / "f")!r}), FileShape(*{tuple(SHAPE)!r}), lock_s=0.1))
    """
    asked = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == "None"
    first.close()
    assert open_tier_file(tmp_path / "f", SHAPE, lock_s=0) is not None


def test_it_is_the_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "f"
    filled(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o620)
    file = file_of(path, DRAM)
    assert not file.holds
    assert "might write" in file.dropped
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_is_no_file_of_this_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "link", "pipe", "absent/f"):
        with pytest.raises(ConfigError, match=r"worker\.dram_path"):
            open_tier_file(tmp_path / name, SHAPE)
    assert not (tmp_path / "target").exists()
    with pytest.raises(ConfigError, match="name a folder of a local disk"):
        open_tier_file(Path("/proc/self/comm"), SHAPE)  # a file system that neither sizes nor maps its files
    if os.geteuid() == 0:
        (tmp_path / "theirs").touch(0o600)
        os.chown(tmp_path / "theirs", 12345, 12345)
        with pytest.raises(ConfigError, match="belongs to uid 12345"):
            open_tier_file(tmp_path / "theirs", SHAPE)


@pytest.mark.parametrize("opened_before", [False, True], ids=["at the start", "after what it held was dropped"])
def test_a_file_that_finds_no_room_is_refused_and_leaves_none_taken(tmp_path: Path, opened_before: bool) -> None:
    """A limit on the size of files stands for a full disk: both refuse the blocks."""
    file = open_tier_file(tmp_path / "f", SHAPE) if opened_before else None
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 * PAGE, before[1]))
    try:
        with pytest.raises(CapacityError, match=r"lower worker\.dram_bytes"):
            file.drop("its erasures are not known") if file else open_tier_file(tmp_path / "f", SHAPE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "f").stat().st_blocks == 0


def test_a_full_disk_is_refused_at_the_start(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "small", str(tmp_path)], check=False).returncode:
        pytest.skip("no right to mount a tmpfs")
    try:
        with pytest.raises(CapacityError, match="No space left"):
            open_tier_file(tmp_path / "f", SHAPE)
        assert (tmp_path / "f").stat().st_blocks == 0
        kept = open_tier_file(tmp_path / "f", SHAPE._replace(data_bytes=4 * PAGE))
        assert kept is not None
        (tmp_path / "other").write_bytes(bytes((64 << 10) - 6 * PAGE))
        kept.data[:] = 1  # its blocks are its own: nothing else can take them
        kept.close()
    finally:
        del kept
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
