"""What a group of workers does in a step of a rollout: from its `worker-status`, and from the answers on `scores`."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topic_check import topics_with
from relaygr_stream.bus.topics import verify_topics
from relaygr_stream.errors import DecodeError
from relaygr_stream.ops.rollout.agreement import Pairs
from relaygr_stream.ops.rollout.judgement import Observed
from relaygr_stream.ops.status.overview import Overview, listening
from relaygr_stream.ops.status.tally import Tally, growth
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.clocks import Clock
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import ScoreReply, WorkerStatus
from relaygr_stream.wire.records import Record

#: Answers of a step whose scores are kept, the first ones: enough for the index to be known within 0.01.
MOST_ANSWERS: Final = 4096
#: Scores of one answer, from all over its candidates: they tell little more than one, since they are of one user.
MOST_SCORES: Final = 16
#: The interval of looks at who owns lanes.
LOOK_S: Final = 0.1
#: The counter of prefix KV that were dropped because an audit deviated or scores were not finite.
DISTRUSTED: Final = "cache_distrusted"

Marks = dict[str, WorkerStatus]


class WorkersView:
    """One group, since the last `begin`. view: follows its statuses; feed `on_scores` the records of its `scores`."""

    def __init__(self, view: Overview, clock: Clock = time.monotonic) -> None:
        self._view = view
        self._clock = clock
        self._whole_s = clock()
        self.answers: TopicTail | None = None  # what feeds `on_scores`
        self.pairs: Pairs | None = None  # gets the answers, too
        self.begin()

    def begin(self) -> None:
        """Begin to count anew: a step begins."""
        self._marks: Marks = self._statuses()
        self._settled: Marks | None = None
        self._scored = 0
        self._scores: dict[str, list[npt.NDArray[np.float32]]] = defaultdict(list)

    def settle(self) -> None:
        """Half of the step's time has passed."""
        if self._settled is None:
            self._settled = self._statuses()

    def on_scores(self, records: list[Record]) -> None:
        """Take some scores of each answer."""
        if self.pairs is not None:
            self.pairs.on_answers(records)
        for record in records:
            if self._scored >= MOST_ANSWERS:
                return
            try:
                reply = decode(ScoreReply, record.value)
            except DecodeError:  # a client's to judge
                continue
            if reply.status != "ok" or not reply.tasks or not len(matrix := reply.matrix()):
                continue
            some = matrix[:: -(-len(matrix) // MOST_SCORES)]
            self._scored += 1
            for column, task in enumerate(reply.tasks):
                self._scores[task].append(some[:, column])

    @property
    def lanes(self) -> int:
        """How many it has."""
        return self._view.topics.lanes

    @property
    def missing_lanes(self) -> int:
        """Lanes that no serving worker owns now."""
        owned = {lane.lane for status in self._view.living_workers().values() for lane in status.lanes}
        return max(0, self.lanes - len(owned))

    async def is_whole(self, within_s: float) -> bool:
        """Whether each lane has an owner now, or within so long."""
        for _ in range(int(within_s / LOOK_S)):
            if not self.missing_lanes:
                break
            await asyncio.sleep(LOOK_S)
        return not self.missing_lanes

    @property
    def workers(self) -> dict[str, WorkerStatus]:
        """The newest statuses of its living workers, by name."""
        return self._view.living_workers()

    @property
    def triggers(self) -> list[str]:
        """The names of its living triggers."""
        return sorted(self._view.living_triggers())

    @property
    def versions(self) -> list[str]:
        """Of the models of its living workers."""
        return sorted({status.model_version for status in self._view.living_workers().values() if status.model_version})

    def observed(self) -> Observed:
        """What it did since `begin`."""
        now_s = self._clock()
        if not self.missing_lanes:
            self._whole_s = now_s
        statuses = self._statuses()
        dropped = sum(
            growth(status.counters, before.counters if (before := self._marks.get(key)) else {}, DISTRUSTED).total()
            for key, status in statuses.items()
        )
        return Observed(
            version=", ".join(self.versions),
            unowned_s=now_s - self._whole_s,
            distrusted=dropped,
            tally=_since(self._marks, statuses),
            settled=Tally() if self._settled is None else _since(self._settled, statuses),
            scored=self._scored,
            scores={task: np.concatenate(parts) for task, parts in self._scores.items()},
            unread=(self.answers and self.answers.trouble) or "",
        )

    def _statuses(self) -> Marks:
        """The newest status of each incarnation, by both."""
        return {f"{name}/{seen.last.incarnation}": seen.last for name, seen in self._view.workers.items()}


def _since(marks: Marks, now: Marks) -> Tally:
    whole = Tally()
    for key, status in now.items():
        whole.add(Tally.between(marks.get(key), status))
    return whole


@asynccontextmanager
async def watching(settings: Settings) -> AsyncIterator[WorkersView]:
    """Watch the group of these settings. Raises BrokerError, TopicError."""
    rows = await verify_topics(settings.kafka)
    topics = topics_with(settings.kafka, rows)
    found = next(row.found for row in rows if row.topic.name == topics.scores.name)
    assert found is not None, "verified"
    async with listening(settings, topics) as (view, _):
        group = WorkersView(view)
        partitions = range(found.partitions)
        answers = TopicTail(settings.kafka, topics.scores.name, partitions, "latest", group.on_scores, relaxed=True)
        async with answers:
            group.answers = answers
            yield group
