"""Whether two models rank the same candidates alike: a pure record of rankings that both answer, and its judgement.

A model that takes item ids for others (another vocabulary, a shifted table) answers, in time, scores of the usual
distribution. What tells is the order in which it puts the same candidates for the same user.

rankings and answers of the old group, answers to copies in the new one ─► pairs of scores ─► stay, go on, or not
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from relaygr_stream.errors import DecodeError
from relaygr_stream.ops.rollout.judgement import MIN_FAILED, StepDecision, other_tasks
from relaygr_stream.telemetry.clocks import Clock
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import RankingRequest, ScoreReply
from relaygr_stream.wire.records import HEADER_CORRELATION, Record, header, kind_of

#: Rankings that both models have scored, before which their agreement tells nothing: 50 of 20 candidates each know a
#: correlation of 0 within 0.03.
MIN_PAIRS: Final = 50
#: The least rank correlation of two models that serve the same purpose. Of examples/movielens on MovieLens-100K, 50
#: candidates: 0.79 to 0.89 with another seed and half the epochs, 0.00 with shuffled items, and 0.31 to 0.58 with items
#: one row off, since neighbours in that file are alike.
LEAST_AGREEMENT: Final = 0.6
#: Part of the copies that may fail: a history by reference may have changed since the old group read it.
MOST_FAILED: Final = 0.1
#: Copies at a time, so that the new group computes beside them what it prefills.
AT_ONCE: Final = 4
#: A copy has so long; a pair that is not whole by then never will be.
COPY_MS: Final = 10_000.0
EXPIRES_S: Final = 2 * COPY_MS / 1e3
CORRELATION_BYTES: Final = 16

Ranks = npt.NDArray[np.float64]


class RankingCopy(NamedTuple):
    """A ranking for the new group, and the correlation id of its answer."""

    request: RankingRequest
    correlation: bytes


@dataclass(eq=False, slots=True)
class _Pair:
    """Both answers to a ranking, as far as they have come."""

    since_s: float
    old: ScoreReply | None = None
    new: ScoreReply | None = None


class Pairs:
    """Feed it the old group's rankings and both groups' answers, and send the copies that it takes.

    failed, refused: copies that the new group did not score, of rankings that the old group scored; refused: for lack
    of time.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._due: list[RankingCopy] = []
        self._waiting: dict[bytes, tuple[_Pair, Literal["old", "new"]]] = {}  # by correlation id
        self._scores: list[tuple[ScoreReply, ScoreReply]] = []
        self.failed = self.refused = 0

    def __len__(self) -> int:
        return len(self._scores)

    def on_rankings(self, records: Iterable[Record]) -> None:
        """Copy some of them: as many as may be under way, and no copies of others."""
        self._drop_expired()
        for record in records:
            correlation = header(record.headers, HEADER_CORRELATION)
            if len(self._waiting) >= 2 * AT_ONCE or kind_of(record.headers) or not correlation:
                continue
            with suppress(DecodeError):  # a worker's to judge
                request = decode(RankingRequest, record.value)
                if not request.hops:
                    self._copy(request, correlation)

    def _copy(self, request: RankingRequest, correlation: bytes) -> None:
        pair, copied = _Pair(self._clock()), secrets.token_bytes(CORRELATION_BYTES)
        self._waiting[correlation] = pair, "old"
        self._waiting[copied] = pair, "new"
        # In full: it leaves no prefix KV of a user who has not moved.
        name, client = f"rollout-{copied.hex()}", "rollout"
        request = msgspec.structs.replace(
            request, request_id=name, client_id=client, mode="full", timeout_ms=COPY_MS, sent_ms=0
        )
        self._due.append(RankingCopy(request, copied))

    def take_due(self) -> list[RankingCopy]:
        """The copies to be sent now, each once."""
        due, self._due = self._due, []
        return due

    def on_answers(self, records: Iterable[Record]) -> None:
        """Take the answers that belong to pairs."""
        for record in records:
            pair, side = self._waiting.pop(header(record.headers, HEADER_CORRELATION), (None, ""))
            if pair is None:
                continue
            with suppress(DecodeError):  # a client's to judge; without it the pair expires
                setattr(pair, side, decode(ScoreReply, record.value))
            if pair.old is not None and pair.new is not None:
                self._complete(pair.old, pair.new)

    def _complete(self, old: ScoreReply, new: ScoreReply) -> None:
        if old.status != "ok" or old.truncated_to or not np.isfinite(old.matrix()).all():
            return
        if new.status in ("overloaded", "deadline_exceeded"):
            self.refused += 1
        elif new.status != "ok" or len(new.matrix()) != len(old.matrix()) or not np.isfinite(new.matrix()).all():
            self.failed += 1
        else:
            self._scores.append((old, new))

    def _drop_expired(self) -> None:
        since_s = self._clock() - EXPIRES_S
        for correlation in [key for key, (pair, _) in self._waiting.items() if pair.since_s < since_s]:
            del self._waiting[correlation]

    def decide(self) -> StepDecision:
        """Whether the first users may move: `next`; `stay` while pairs are missing, or `back`, each with its reason."""
        count = len(self) + self.failed
        if count >= MIN_FAILED and self.failed > MOST_FAILED * count:
            return StepDecision(
                "back",
                f"{self.failed} of {count} rankings that the old group answered failed or were rejected in the new",
            )
        if len(self) < MIN_PAIRS:
            refused = f"; {self.refused} more were refused by the new group for lack of time" if self.refused else ""
            return StepDecision("stay", f"waits for {MIN_PAIRS} rankings of both models; it has {len(self)}{refused}")
        return self._compared()

    def _compared(self) -> StepDecision:
        old, new = self._scores[0]
        if (why := next(other_tasks(new.tasks, old.tasks), None)) is not None:
            return StepDecision("back", why)
        told = []
        for task in old.tasks:
            pairs = [(_column(one, task), _column(other, task)) for one, other in self._scores]
            if (found := agreement(pairs)) is not None:
                told.append(f"{task} {found:.2f}")
                if found < LEAST_AGREEMENT:
                    return StepDecision(
                        "back",
                        f"the new model ranks the same candidates by {task!r} in another order: rank correlation "
                        f"{found:.2f} over {len(pairs)} rankings, the least is {LEAST_AGREEMENT:g}; does it have the "
                        f"item ids that it was trained with? --unlike moves users all the same",
                    )
        return StepDecision("next", f"rank correlation with the old model: {', '.join(told) or 'no order to compare'}")


def _column(reply: ScoreReply, task: str) -> npt.NDArray[np.float32]:
    return reply.matrix()[:, reply.tasks.index(task)]


def agreement(pairs: Sequence[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]) -> float | None:
    """The rank correlation of old and new scores (m,) within each ranking, over all of them: from −1 to 1.

    Where no ranking has candidates of different scores: across rankings. None where all old scores are equal; 0 where
    only the new ones are.
    """
    within = _correlation([(ranks(old), ranks(new)) for old, new in pairs])
    if within is not None:
        return within
    old, new = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return _correlation([(ranks(old), ranks(new))])


def ranks(scores: npt.NDArray[np.float32]) -> Ranks:
    """The place of each score, from −½ to ½; equal scores have one place, and the mean is 0."""
    _, which, counts = np.unique(scores, return_inverse=True, return_counts=True)
    places: Ranks = (np.cumsum(counts) - (counts + 1) / 2)[which]
    return (places - (len(scores) - 1) / 2) / len(scores)


def _correlation(pairs: Sequence[tuple[Ranks, Ranks]]) -> float | None:
    old, new = (np.concatenate(side) for side in zip(*pairs, strict=True))
    ours, theirs = float(old @ old), float(new @ new)
    if not ours:
        return None
    return float(old @ new) / math.sqrt(ours * theirs) if theirs else 0.0
