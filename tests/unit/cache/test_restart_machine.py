"""A tier in a file, at random, and killed at any write: what is found again was there, whole, and of nobody erased."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.cache.tier_file import TierFile
from relaygr_stream.models.kv import KVLayout
from tests.properties import examples
from tests.unit.cache.play import Going, Play
from tests.unit.cache.worlds import LAYOUT, MOST, WITH_STATE, Flaky, entries, file_of, holds, make, settle

USERS = st.integers(0, 4)
WHICH = st.integers(0, 50)
HBM, DRAM = 9, 20


class WatchedFile(TierFile):
    """Calls `before_write` before each change in front of the data."""

    before_write: Callable[[], None] | None = None

    def _put(self, at: int, data: bytes) -> None:
        if self.before_write is not None:
            self.before_write()
        super()._put(at, data)


class RestartMachine(RuleBasedStateMachine):
    """Requests, spills, hand-overs and erasures; at any write the file is copied, as a kill leaves it."""

    layout: KVLayout = LAYOUT

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.file = file_of(Path(self.folder.name) / "file", DRAM, self.layout)
        self.file.__class__ = WatchedFile
        assert isinstance(self.file, WatchedFile)
        self.watched = self.file
        self.play = Play(HBM, DRAM, Flaky(), layout=self.layout, file=self.file)
        self.asked: dict[str, set[tuple[int, int]]] = {}  # user → version, length, since the user was erased
        self.kill_in = 0
        self.killed: tuple[bytes, dict[str, set[tuple[int, int]]]] | None = None
        for user in range(4):
            self.request(user, 0, 30 + 50 * user, at_once=True)
        self.rest()

    # ---- what happens ----

    @rule(user=USERS, version=st.sampled_from([0, 0, 0, 1]), length=st.integers(1, MOST), at_once=st.booleans())
    def request(self, user: int, version: int, length: int, at_once: bool) -> None:
        self._asked(user, version, length)
        self.play.request(user, version, length, at_once=at_once or user < 4)
        if user < 3:
            self.rest()

    @rule(which=WHICH, how=st.sampled_from(["finish", "part", "cut short", "abort"]), share=st.floats(0, 1))
    def go_on(self, which: int, how: Going, share: float) -> None:
        self.play.go_on(which, how, share)

    @rule()
    def rest(self) -> None:
        """Readers go, and all that is idle is written down."""
        while self.play.readers:
            self.play.let_go(0)
        for _ in range(4):
            self.play.poll(100)

    @rule(user=USERS)
    def lend(self, user: int) -> None:
        self.play.lend(user)

    @rule(which=WHICH)
    def give_back(self, which: int) -> None:
        self.play.give_back(which)

    @rule(user=USERS, version=st.sampled_from([0, 1]), length=st.integers(1, MOST))
    def reserve(self, user: int, version: int, length: int) -> None:
        self._asked(user, version, length)
        self.play.reserve(user, version, length)

    @rule(which=WHICH, whole=st.booleans())
    def arrive(self, which: int, whole: bool) -> None:
        if self.play.reservations and self.play.reservations[which % len(self.play.reservations)].erased:
            self.play.cache.transit.fill(self.play.reservations.pop(which % len(self.play.reservations)))
        else:
            self.play.arrive(which, whole=whole)

    @rule(copies=st.sampled_from([100, 1, 0]))
    def poll(self, copies: int) -> None:
        self.play.poll(copies)

    @rule(fails=st.integers(0, 3))
    def next_copy_fails(self, fails: int) -> None:
        self.play.copier.fail_next = fails // 3

    @rule(user=USERS)
    def erase(self, user: int) -> None:
        self.play.cache.erase_users({f"u{user}"})
        self.asked.pop(f"u{user}", None)

    @rule(writes=st.integers(1, 12))
    def kill_at_a_write(self, writes: int) -> None:
        """The file is copied before the so-manieth write from now on."""
        self.kill_in = writes
        self.watched.before_write = self._count

    # ---- what must hold ----

    @rule(seed=st.integers(0, 2**32), damage=st.sampled_from(["", "", "flip", "cut", "stale", "other"]))
    def restart(self, seed: int, damage: str) -> None:
        """Another process takes the file as it was at the kill, or as it is now."""
        content, asked = self.killed or (self._content(), self._copy_of_asked())
        self.killed = None
        path = Path(self.folder.name) / "killed"
        path.write_bytes(damaged(content, damage, random.Random(seed)))
        path.chmod(0o600)
        file = file_of(path, DRAM, self.layout, "another model" if damage == "other" else "toy")
        copier = Flaky()
        cache = make(HBM, DRAM, copier, layout=self.layout, file=file)
        found = cache.restore()
        cache.check_integrity()
        if damage in ("cut", "other"):
            assert not found.entries
            assert file.dropped
        for entry in entries(cache):
            self._check(cache, copier, entry.user_id, asked, damaged=bool(damage))
        cache.check_integrity()
        file.close()
        path.unlink()

    @invariant()
    def books(self) -> None:
        if hasattr(self, "play"):
            self.play.check_books()
            self.play.check_contents()

    def teardown(self) -> None:
        if hasattr(self, "play"):
            self.watched.before_write = None
            self.file.close()
            self.folder.cleanup()

    # ---- inside ----

    def _check(
        self, cache: PrefixCache, copier: Flaky, user: str, asked: dict[str, set[tuple[int, int]]], *, damaged: bool
    ) -> None:
        table_entry = cache.find(user, entries(cache)[0].tokens)[0]
        if table_entry is None:
            return  # evicted for another of them
        assert cache.load(table_entry)
        settle(cache, copier)
        if table_entry.failed:
            assert damaged
            assert table_entry not in entries(cache)
            return
        assert table_entry.region is not None
        assert holds(table_entry.region, table_entry.tokens)
        first, length = int(table_entry.tokens.array[0, 0]), len(table_entry.tokens)
        version = first // 1_000 % 10
        assert first == 10_000 * int(user[1:]) + 1_000 * version
        longest = max((most for each, most in asked.get(user, set()) if each == version), default=0)
        assert length <= longest, f"{user} was erased, or never asked for so much"

    def _asked(self, user: int, version: int, length: int) -> None:
        self.asked.setdefault(f"u{user}", set()).add((version, length))

    def _copy_of_asked(self) -> dict[str, set[tuple[int, int]]]:
        return {user: set(asked) for user, asked in self.asked.items()}

    def _content(self) -> bytes:
        return self.file.path.read_bytes()

    def _count(self) -> None:
        self.kill_in -= 1
        if self.kill_in == 0:
            self.killed = self._content(), self._copy_of_asked()


def damaged(content: bytes, how: str, rng: random.Random) -> bytes:
    """The file's bytes, as something has spoiled them."""
    spoiled = bytearray(content)
    if how == "cut":
        del spoiled[rng.randrange(1, len(spoiled)) :]
    elif how == "flip":
        for _ in range(rng.choice([1, 8, 64])):
            spoiled[rng.choice([rng.randrange(len(spoiled)), rng.randrange(4096, 8192)])] ^= 1 << rng.randrange(8)
    elif how == "stale":  # a page that never came to the disk
        at = rng.randrange(1, len(spoiled) // 4096) * 4096
        spoiled[at : at + 4096] = bytes(4096)
    return bytes(spoiled)


class RestartWithState(RestartMachine):
    """Prefix KV with a state."""

    layout = WITH_STATE


SETTINGS = settings(max_examples=examples(50), stateful_step_count=30, suppress_health_check=list(HealthCheck))
TestRestart = RestartMachine.TestCase
TestRestart.settings = SETTINGS
TestRestartWithState = RestartWithState.TestCase
TestRestartWithState.settings = settings(SETTINGS, max_examples=examples(15))
