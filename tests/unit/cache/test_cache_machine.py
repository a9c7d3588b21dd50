"""The cache alone, at random: every entry carries its own bytes wherever it goes, and the books hold at each step."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.properties import examples
from tests.unit.cache.play import Going, Play
from tests.unit.cache.worlds import LAYOUT, MOST, WITH_STATE, Copies, Flaky, Slow

WHICH = st.integers(0, 50)


class CacheMachine(RuleBasedStateMachine):
    """Copies are made when the machine says so."""

    incremental = True
    layout = LAYOUT
    copies: type[Copies] = Flaky

    @initialize(dram=st.sampled_from([None, 3, 6, 20]), hbm=st.sampled_from([6, 7, 8, 9, 10, 24]))
    def begin(self, dram: int | None, hbm: int) -> None:
        self.play = Play(hbm, dram, self.copies(), incremental=self.incremental, layout=self.layout)

    @rule(
        user=st.integers(0, 4),
        version=st.sampled_from([0, 0, 0, 1]),
        length=st.integers(1, MOST),
        at_once=st.sampled_from([True, True, True, False]),
    )
    def request(self, user: int, version: int, length: int, at_once: bool) -> None:
        self.play.request(user, version, length, at_once=at_once)

    @rule(
        which=WHICH,
        how=st.sampled_from(["finish", "finish", "part", "cut short", "abort"]),
        share=st.floats(0, 1),
    )
    def go_on(self, which: int, how: Going, share: float) -> None:
        self.play.go_on(which, how, share)

    @rule(which=WHICH)
    def pin_what_is_not_ready(self, which: int) -> None:
        self.play.pin_what_is_not_ready(which)

    @rule(which=WHICH)
    def let_go(self, which: int) -> None:
        self.play.let_go(which)

    @rule(user=st.integers(0, 4))
    def lend(self, user: int) -> None:
        self.play.lend(user)

    @rule(which=WHICH)
    def give_back(self, which: int) -> None:
        self.play.give_back(which)

    @rule(user=st.integers(0, 4), version=st.sampled_from([0, 0, 1]), length=st.integers(1, MOST))
    def reserve(self, user: int, version: int, length: int) -> None:
        self.play.reserve(user, version, length)

    @rule(which=WHICH, whole=st.sampled_from([True, True, False]))
    def arrive(self, which: int, whole: bool) -> None:
        self.play.arrive(which, whole=whole)

    @rule(copies=st.sampled_from([100, 100, 1, 0]))
    def poll(self, copies: int) -> None:
        self.play.poll(copies)

    @rule(fails=st.integers(0, 3))
    def next_copy_fails(self, fails: int) -> None:
        self.play.copier.fail_next = fails // 3

    @rule()
    def use_scratch(self) -> None:
        self.play.use_scratch()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "play"):
            self.play.check_books()
            self.play.check_contents()

    def teardown(self) -> None:
        if hasattr(self, "play"):
            self.play.end()


class WholeSequencesOnly(CacheMachine):
    """A model whose K/V of a beginning are not those of the whole."""

    incremental = False


class WithState(CacheMachine):
    """Prefix KV with a state, which readers and copies must never find rewritten."""

    layout = WITH_STATE


class CopiedByThreads(CacheMachine):
    """The engine's own threads, slow enough that evictions, pins and polls come in between."""

    copies = Slow


SETTINGS = settings(max_examples=examples(60), stateful_step_count=50, suppress_health_check=list(HealthCheck))
TestCache = CacheMachine.TestCase
TestCache.settings = SETTINGS
TestWholeSequencesOnly = WholeSequencesOnly.TestCase
TestWholeSequencesOnly.settings = settings(SETTINGS, max_examples=examples(20))
TestWithState = WithState.TestCase
TestWithState.settings = settings(SETTINGS, max_examples=examples(40))
TestCopiedByThreads = CopiedByThreads.TestCase
TestCopiedByThreads.settings = settings(SETTINGS, max_examples=examples(20))
