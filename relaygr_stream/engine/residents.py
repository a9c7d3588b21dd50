"""Residents: the prefix KV that are here or on their way, and who holds them: rankings, and admitted requests (pins).

    find ─► acquire ─► HBM: ready | being computed | in DRAM: load | shorter: prefill the rest | nothing: prefill all
               └─ another sequence of the user, on a better word (Source): that stays

A signal pins what it acquires (signals.py). A ranking is scored from it, once it is ready, or inferred in the scratch
region where there is nothing to hold; one that was cut to its newest behaviours (Admission.truncate) always is: they
are not a prefix of the user's history.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Literal, NamedTuple

from relaygr_stream.cache.entry import Coverage, Entry, Found, Source
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.engine.audit import Auditor
from relaygr_stream.engine.commands import DELEGATED_LANE, PrefillTask, RankTask
from relaygr_stream.engine.executor import Executor
from relaygr_stream.engine.held_once import HeldOnce
from relaygr_stream.engine.prefill import PrefillJobs
from relaygr_stream.engine.queue import TimerHeap, Waiters, WorkQueue
from relaygr_stream.engine.ranking import PrefillJob, Ranking
from relaygr_stream.models.api import ScoreInput, Tokens, takes_suffix
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.wire.messages import Outcome

#: By so much each ranking moves the head start that requests usually have. Half as long or twice as long is learned
#: within 15 rankings, and one that comes very late counts no more than others.
HEAD_START_STEP: Final = 1.05
#: The least head start that is learned: from 0, no number of steps leads away.
LEAST_HEAD_START_MS: Final = 1.0

#: What there is: all of it in HBM; an entry that is computed, or loaded, for others; a load or a job begun now, for
#: what is in DRAM, for what a shorter entry lacks, or for everything; or nothing to hold, because HBM has no room or
#: the user's other sequence stays.
Way = Literal["ready", "computing", "loading", "dram", "shorter", "nothing", "no_room", "kept"]


class Acquired(NamedTuple):
    """An entry that a caller may hold now, before anything else changes the cache; None where there is nothing to hold.

    whole: it has, or will have, all of the prefix; False: acquire again once its copy or computation is over. missing:
    tokens of the job that was begun.
    """

    way: Way
    entry: Entry | None = None
    whole: bool = True
    missing: int = 0


NO_ROOM: Final = Acquired("no_room")
KEPT: Final = Acquired("kept")


class Residents:
    """Finds prefix KV, begins what lacks of them, and places rankings.

    A ranking that has its prefix KV goes to the queue of those that are ready to be scored; any other holds what it
    waits for, a prefill job, a load or the scratch region, and is placed again when that is over.
    """

    def __init__(
        self,
        executor: Executor,
        cache: PrefixCache,
        jobs: PrefillJobs,
        queue: WorkQueue,
        waiters: Waiters,
        auditor: Auditor,
    ) -> None:
        self.executor: Final = executor
        self.cache: Final = cache
        self.jobs: Final = jobs
        self.queue: Final = queue
        self.waiters: Final = waiters
        self.auditor: Final = auditor
        self.pins: Final = PinTable(cache)
        self._scratch_wanted: TimerHeap[Ranking] = TimerHeap(attrgetter("answered"))
        self._in_scratch: Ranking | None = None  # the last one there
        self._takes_suffix = takes_suffix(executor.model)
        self._empty = KVRegion.new(executor.model.layout, 0, device=executor.device)

    # ---- what there is, for a signal or a ranking ----

    def find(self, task: PrefillTask | RankTask) -> Found:
        """The user's entry and its coverage. If it is of no use, what the request's own signal pinned: a newer sequence
        of the user may have replaced that."""
        found = self.cache.find(task.user_key, task.tokens)
        if found[1] is Coverage.NONE:
            pinned = self.pins.entry(task.request_key)
            if pinned is not None and self._serves(pinned, task.tokens):
                return pinned, Coverage.COVERS
        return found

    def is_here(self, found: Found, tokens: Tokens) -> bool:
        """Whether all of it is here. While it is computed, for a later request, a ranking would wait for what another
        worker may have ready."""
        entry, coverage = found
        if entry is None or coverage is not Coverage.COVERS:
            return False
        return not entry.computing or self.cache.serves(entry, tokens)

    def acquire(self, task: PrefillTask | RankTask, found: Found) -> Acquired:
        """What to hold for this task's prefix; begins the load or the job that it needs. found: by `find`, just now."""
        (entry, coverage), tokens = found, task.tokens
        signal = task if isinstance(task, PrefillTask) else None
        if entry is None or coverage is Coverage.NONE:
            source = self.pins.source(task.request_key) if signal is None else source_of(signal.lane)
            if entry is not None and entry.source > source:
                return KEPT
            return self._begin("nothing", self.cache.open(task.user_key, tokens, source), task)
        if signal is not None:
            self.cache.confirm(entry, source_of(signal.lane))
        whole = coverage is Coverage.COVERS
        if whole and entry.load is None and self.cache.serves(entry, tokens):
            return Acquired("ready", entry)
        if entry.computing or entry.load is not None:
            return Acquired("computing" if entry.computing else "loading", entry, whole)
        if entry.region is None:
            return Acquired("dram", entry, whole) if self.cache.load(entry) else NO_ROOM
        way: Way = "shorter"
        if (begun := self.cache.extend(entry, tokens)) is None:
            way, begun = "nothing", self.cache.open(task.user_key, tokens, entry.source)
        return self._begin(way, begun, task)

    def contradict(self, signal: PrefillTask) -> None:
        """A signal asks for its sequence and does not get it: another one of its user is outdated all the same."""
        entry, coverage = self.find(signal)
        if entry is not None and coverage is Coverage.NONE:
            self.cache.contradict(entry, source_of(signal.lane))

    def _serves(self, entry: Entry, tokens: Tokens) -> bool:
        """Whether the entry has, or will have, this prefix."""
        return not entry.failed and self.cache.coverage(entry, tokens) is Coverage.COVERS

    def _begin(self, way: Way, entry: Entry | None, task: PrefillTask | RankTask) -> Acquired:
        """Begin the job of an entry that lacks tokens."""
        if entry is None:
            return NO_ROOM
        assert entry.region is not None
        self.jobs.start(entry, task if isinstance(task, PrefillTask) else None)
        return Acquired(way, entry, missing=len(entry.tokens) - entry.region.length)

    # ---- rankings ----

    def place(self, ranking: Ranking, found: Found) -> None:
        """Have it scored against what was found, or wait for what lacks; the ranking holds nothing yet."""
        tokens, measured = ranking.tokens, ranking.measured
        if len(tokens) == 0 and (len(ranking.suffix) == 0 or self._takes_suffix):
            self.ready(ranking, self._empty, "full")
            return
        if ranking.full or (len(ranking.suffix) and not self._takes_suffix):
            self._infer_in_scratch(ranking)
            return
        got = self.acquire(ranking.task, found)
        if (entry := got.entry) is None:
            self._infer_in_scratch(ranking)
            return
        self.cache.pin(entry)
        ranking.held.entry = entry
        if got.way == "ready":
            assert entry.region is not None
            self.ready(ranking, entry.region.first(len(tokens)), "hbm")
        elif got.way in ("dram", "loading"):
            measured.outcome = measured.outcome or "dram"
            self.waiters.add(entry, ranking)
        else:
            measured.computed_tokens = got.missing or measured.computed_tokens
            # What is shorter counts as joined: it is not ready, what it lacks is computed first.
            measured.outcome = "full" if got.way == "nothing" else measured.outcome or "joined"
            self.jobs.join(ranking, entry)

    def place_again(self, ranking: Ranking) -> None:
        """What the ranking waited for is over: place it anew. One that is answered by now stays so."""
        if ranking.answered:
            return
        held = ranking.held.entry
        if held is not None and held.region is not None and held.ready and self._serves(held, ranking.tokens):
            # Even if the user's entry is another by now: else two sequences of one user displace each other for ever.
            self.ready(ranking, held.region.first(len(ranking.tokens)), "hbm")
        else:
            self.let_go(ranking)
            self.place(ranking, self.find(ranking.task))

    def ready(self, ranking: Ranking, region: KVRegion, outcome: Outcome) -> None:
        """The ranking is to be scored against this region. outcome: kept only where an earlier placement gave none."""
        ranking.measured.outcome = ranking.measured.outcome or outcome
        # What the region lacks of the whole sequence: perhaps the end of the prefix (worker.max_stale_tokens), and the
        # suffix unless it was inferred with the prefix.
        suffix, there, prefix = ranking.suffix, region.length, len(ranking.tokens)
        if there < prefix:
            suffix = ranking.tokens.slice(there, prefix).followed_by(suffix)
        elif there > prefix:
            suffix = suffix.slice(there - prefix, len(suffix))
        ranking.held.scored = ScoreInput(region, suffix, ranking.task.candidates, ranking.task.features)
        self.queue.add(ranking)

    def lend_scratch(self) -> None:
        """Start the full inference that is due first of those that need the scratch region, if it is free."""
        while (first := self._scratch_wanted.first()) is not None:
            due, ranking = first
            if ranking.due > due:  # it has become late
                self._scratch_wanted.pop()
                self._scratch_wanted.add(ranking.due, ranking)
                continue
            if not self._scratch_free():
                return
            self._scratch_wanted.pop()
            self._in_scratch = ranking
            tokens = ranking.tokens if self._takes_suffix else ranking.tokens.followed_by(ranking.suffix)
            ranking.measured.computed_tokens = len(tokens)
            self.jobs.start_in_scratch(ranking, tokens)

    def in_the_way(self) -> Ranking | PrefillJob | None:
        """What has the scratch region while a ranking that is in time waits for it, and is late itself, or over."""
        first = self._scratch_wanted.first()
        if first is None or first[1].late:
            return None
        holder, job = self._in_scratch, self.jobs.in_scratch
        if job is not None and not job.over:
            return job
        return holder if holder is not None and holder.held.borrowed and not holder.answered else None

    def moved(self, ranking: Ranking) -> None:
        """The ranking is late by now: it has another place in the queue."""
        if ranking.held.scored is not None:
            self.queue.add(ranking)
        else:
            self.jobs.moved(ranking)

    def let_go(self, ranking: Ranking) -> None:
        """Unpin its entry, or give the scratch region back: before it is placed again, or answered."""
        held = ranking.held
        if held.entry is not None:
            self.cache.unpin(held.entry)
            held.entry = None
        if held.borrowed and held.scored is not None:  # before it completes, the job has the scratch
            self.cache.scratch.give_back(held.scored.kv)
            held.borrowed = False
        held.scored = None

    def _infer_in_scratch(self, ranking: Ranking) -> None:
        """Infer the whole sequence for this ranking alone."""
        ranking.measured.outcome = "truncated" if ranking.measured.truncated_to else "full"
        self._scratch_wanted.add(ranking.due, ranking)
        self.lend_scratch()  # to this one, unless another that waits is due before it

    def _scratch_free(self) -> bool:
        return self.cache.scratch.free or self.auditor.give_up_scratch(self.cache.scratch)


# ---- pins: the holds of admitted requests, until their rankings come, and how many bytes of which lane ----


def source_of(lane: int) -> Source:
    """What a signal on this lane is to the entry that it asks for."""
    return Source.DELEGATED if lane == DELEGATED_LANE else Source.SIGNAL


@dataclass(slots=True, eq=False)
class Pin:
    """One admitted request's hold on an entry."""

    request_id: str
    entry: Entry
    lane: int
    nbytes: int
    since: float  # when its signal was read
    charged: str  # as of its signal
    scenario: str
    ranked: bool = False
    released: bool = False


class PinTable:
    """Pins by request id; each ends with its ranking or with its life window, whichever comes first."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._pins: dict[str, Pin] = {}
        self._ends: TimerHeap[Pin] = TimerHeap(attrgetter("released"))
        self._lane_bytes: defaultdict[int, int] = defaultdict(int)
        self.delegated: HeldOnce[int] = HeldOnce()  # on other workers' behalf, by DELEGATED_LANE
        self.tenants: HeldOnce[str] = HeldOnce()  # by PrefillTask.charged
        self._scenarios: HeldOnce[tuple[str, bool]] = HeldOnce()  # and whether on other workers' behalf
        self.unheld: list[Entry] = []  # entries whose last pin ended while they were computed; the scheduler takes them
        self.expired = 0
        self.head_start_ms = 0.0  # from a signal to its ranking, about the median of the last; 0: unknown

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pins

    @property
    def next_end(self) -> float | None:
        """When the next life window ends."""
        first = self._ends.first()
        return None if first is None else first[0]

    def entry(self, request_id: str) -> Entry | None:
        """What the request pins; None: nothing."""
        pin = self._pins.get(request_id)
        return None if pin is None else pin.entry

    def source(self, request_id: str) -> Source:
        """On whose word the request asks for prefix KV: its own signal's, as long as that pins; else a ranking's."""
        pin = self._pins.get(request_id)
        return Source.RANKING if pin is None else source_of(pin.lane)

    def lane_bytes(self, lane: int) -> int:
        """Bytes that a lane's pinned requests were admitted for.

        As in the trigger's ledger: an entry held by two of them counts twice, and one that holds more tokens than
        asked for counts as asked for. What is physically held is the cache's pinned_bytes. No ledger counts
        DELEGATED_LANE, so an entry counts once there: a user who returns soon has several requests on their way.
        """
        return self.delegated.bytes_of(lane) if lane == DELEGATED_LANE else self._lane_bytes.get(lane, 0)

    def tenant_bytes(self, entry: Entry | None, nbytes: int) -> int:
        """Bytes that an entry counts for its tenant: what it takes, or nbytes, which it is pinned for, if more."""
        return nbytes if entry is None else max(nbytes, self._cache.entry_bytes(entry))

    def add(
        self,
        request_id: str,
        lane: int,
        entry: Entry,
        expires: float,
        nbytes: int,
        since: float,
        charged: str = "",
        scenario: str = "",
    ) -> None:
        """Hold the entry for an admitted request; a request pins once. nbytes: what it was admitted for. since: when
        its signal was read."""
        assert request_id not in self._pins
        self._cache.pin(entry)
        pin = Pin(request_id, entry, lane, nbytes, since, charged, scenario)
        self._pins[request_id] = pin
        if lane == DELEGATED_LANE:
            self.delegated.add(lane, entry, nbytes)
        else:
            self._lane_bytes[lane] += nbytes
        held = self.tenant_bytes(entry, nbytes)
        self.tenants.add(charged, entry, held)
        if scenario:
            self._scenarios.add((scenario, lane == DELEGATED_LANE), entry, held)
        self._ends.add(expires, pin)

    def ranked(self, request_id: str, arrived: float) -> None:
        """A ranking came: learn its head start, if it is its request's first, and the request one of our own users."""
        pin = self._pins.get(request_id)
        if pin is None or pin.ranked or pin.lane == DELEGATED_LANE:
            return
        pin.ranked = True
        took_ms, usual_ms = max(LEAST_HEAD_START_MS, (arrived - pin.since) * 1e3), self.head_start_ms
        step = HEAD_START_STEP if took_ms > usual_ms else 1 / HEAD_START_STEP
        self.head_start_ms = usual_ms * step if usual_ms else took_ms

    def release(self, request_id: str) -> bool:
        """End the pin of a request whose ranking was answered; False if it had none."""
        pin = self._pins.pop(request_id, None)
        if pin is None:
            return False
        pin.released = True
        if pin.lane == DELEGATED_LANE:
            self.delegated.release(pin.lane, pin.entry)
        else:
            self._lane_bytes[pin.lane] -= pin.nbytes
        self.tenants.release(pin.charged, pin.entry)
        if pin.scenario:
            self._scenarios.release((pin.scenario, pin.lane == DELEGATED_LANE), pin.entry)
        self._cache.unpin(pin.entry)
        if pin.entry.computing and not pin.entry.pins:
            self.unheld.append(pin.entry)
        return True

    def scenario_bytes(self, scenario: str) -> int:
        """Bytes that the scenario's requests have pinned."""
        return sum(self._scenarios.bytes_of((scenario, delegated)) for delegated in (False, True))

    def latest_of_heavier(self, scenario: str, nbytes: int, *, delegated: bool) -> str | None:
        """The latest request of the scenario that has pinned most, if that is more than this one would have with nbytes
        more; None: there is none whose pin alone keeps its entry. delegated: on other workers' behalf, or not."""
        held = {name for name, kind in self._scenarios if kind is delegated}
        most = max(held, key=lambda name: self._scenarios.bytes_of((name, delegated)), default=scenario)
        own = self._scenarios.bytes_of((scenario, delegated)) + nbytes
        if most == scenario or self._scenarios.bytes_of((most, delegated)) <= own:
            return None
        for pin in reversed(self._pins.values()):
            if pin.scenario == most and (pin.lane == DELEGATED_LANE) is delegated and pin.entry.pins == 1:
                return pin.request_id
        return None

    def release_lanes(self, lanes: Iterable[int]) -> None:
        """End the pins of lanes that have another owner now: their rankings will not come here."""
        gone = set(lanes)
        for request_id in [key for key, pin in self._pins.items() if pin.lane in gone]:
            self.release(request_id)

    def release_entry(self, entry: Entry) -> None:
        """End all pins of an entry that failed."""
        for request_id in [key for key, pin in self._pins.items() if pin.entry is entry]:
            self.release(request_id)

    def expire(self, now: float) -> None:
        """End the pins whose life window is over."""
        while (first := self._ends.first()) is not None and first[0] <= now:
            self.release(first[1].request_id)
            self.expired += 1

    def holds(self) -> Counter[Entry]:
        """How often each entry is pinned from here."""
        return Counter(pin.entry for pin in self._pins.values())
