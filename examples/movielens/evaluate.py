"""Leave-one-out over the whole catalogue: where does the model rank a user's next item?

As gSASRec-pytorch evaluates: every item that occurs in the file is a candidate, items of the user's history are not
ranked (unless the user takes items again), HR@10 and NDCG@10 are means over users. Scores come from the served model's
own two operations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch

from examples.movielens.data import Histories, History, Ints
from relaygr_stream.models.api import KVRegion, RankingModel, ScoreInput, Tokens
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.workload.report import LiveLine

Floats = npt.NDArray[np.float64]

#: `held_out` of `split`: which of a user's last behaviours is the target.
TEST: Final = 1
VALIDATION: Final = 2
#: Newest behaviours of the curve of lengths, and the length that others are compared with.
LENGTHS: Final = (25, 50, 100, 200, 500, 1000)
SHORT: Final = 50
#: Users with at least so many behaviours, each group ranked at every length.
GROUPS: Final = (200, 500, 1000)
#: Groups smaller than this are shown and not concluded from.
ENOUGH_USERS: Final = 100
#: The ranks of a checkpoint, kept beside it.
OFFLINE_FILE: Final = "offline.npz"


class Quality(NamedTuple):
    """Means over users."""

    hr: float
    ndcg: float

    def __str__(self) -> str:
        return f"HR@10 {self.hr:.4f}, NDCG@10 {self.ndcg:.4f}"


def quality(ranks: Ints, at: int = 10) -> Quality:
    """HR and NDCG at `at` of ranks (users,), 0 for the best."""
    return Quality(float((ranks < at).mean()), float(ndcg(ranks, at).mean()))


def ndcg(ranks: Ints, at: int = 10) -> Floats:
    """NDCG of one relevant item per user, (users,): 1 / log2(rank + 2), and 0 from rank `at` on."""
    return np.where(ranks < at, 1 / np.log2(ranks + 2.0), 0.0)


def rank_of(scores: npt.NDArray[np.float32], target: int, seen: Ints) -> int:
    """How many items that are not in `seen` score at least as high as `target`; scores (items,).

    A tie counts against the model, so one that scores everything alike ranks last.
    """
    better = scores >= scores[target]
    better[seen] = False
    better[target] = False
    return int(better.sum())


def split(user: History, held_out: int, longest: int) -> tuple[History, int, Ints]:
    """(the last `longest` behaviours before the target, the target, the items before it, which are not ranked).

    held_out: TEST: the last behaviour is the target; VALIDATION: the one before it. Where a user takes items again, all
    are ranked: the target could be any, and leaving out all others of the history would tell which.
    """
    stop = len(user) - held_out
    seen = user.items[:stop]
    if len(np.unique(user.items[: stop + 1])) <= stop:
        seen = seen[:0]
    return user.slice(max(0, stop - longest), stop), int(user.items[stop]), seen


def behaviours_of(history: History) -> Behaviours:
    """The history as it travels."""
    return Behaviours.from_arrays(history.items, history.actions, history.times)


def scores_of(model: RankingModel, history: History, candidates: Ints, region: KVRegion) -> npt.NDArray[np.float32]:
    """Full inference: the first task's scores (m,). `region` is overwritten."""
    region.length = 0
    model.prefill(region, Tokens.from_behaviours(behaviours_of(history)))
    scores = model.score([ScoreInput(region, Tokens(np.zeros((3, 0), np.int64)), candidates)])[0]
    return np.asarray(scores[:, 0].cpu().numpy())


def evaluate(
    model: RankingModel,
    users: Sequence[History],
    items: int,
    longest: int,
    held_out: int,
    progress: Callable[[int], None] | None = None,
) -> Ints:
    """The rank (users,) of each user's target among all `items`, behind the last `longest` behaviours before it.

    progress: called behind each user with the number of users done.
    """
    candidates = np.arange(items)
    region = KVRegion.new(model.layout, longest)
    ranks = np.zeros(len(users), np.int64)
    with torch.no_grad():
        for index, user in enumerate(users):
            history, target, seen = split(user, held_out, longest)
            ranks[index] = rank_of(scores_of(model, history, candidates, region), target, seen)
            if progress is not None:
                progress(index + 1)
    return ranks


def popularity(data: Histories, held_out: int) -> npt.NDArray[np.float32]:
    """A score (items,) by how often an item is in all behaviours before the held out ones; ties by the items' order."""
    counts = np.bincount(np.concatenate([user.items[:-held_out] for user in data.users]), minlength=len(data.names))
    scores = np.empty(len(counts), np.float32)
    scores[np.argsort(-counts, kind="stable")] = -np.arange(len(counts))
    return scores


def popularity_ranks(data: Histories, users: Sequence[History], held_out: int) -> Ints:
    """As `evaluate`, by `popularity`."""
    scores = popularity(data, held_out)
    ranks = np.zeros(len(users), np.int64)
    for index, user in enumerate(users):
        _, target, seen = split(user, held_out, len(user))
        ranks[index] = rank_of(scores, target, seen)
    return ranks


# What length buys.


def offline_ranks(model: RankingModel, data: Histories, longest: int, out: Path) -> dict[str, Ints]:
    """Ranks of the test item: "test" for all users, "n" with the last n behaviours for those with GROUPS[0] or more.

    A user with at most n behaviours before the test item has the rank of "test" at n. Kept in OFFLINE_FILE with the
    model's version and a digest of the data, since they take longer than the rest of a run without training.
    """
    file, key = out / OFFLINE_FILE, f"{model.version} {_digest(data)}"
    # A file that cannot be read is written anew.
    with suppress(OSError, ValueError, KeyError, EOFError, BadZipFile), file.open("rb") as raw, np.load(raw) as kept:
        if str(kept["key"]) == key:
            found = {name: kept[name] for name in kept.files if name != "key"}
            print(f"from {file}, of this checkpoint and this data")
            return found
    items, line = len(data.names), LiveLine()

    def ranked(users: Sequence[History], length: int) -> Ints:
        def progress(done: int) -> None:
            if line.due():
                line.show(f"offline, the last {length:,} behaviours: {done:,} of {len(users):,} users")

        return evaluate(model, users, items, length, TEST, progress)

    found = {"test": ranked(data.users, longest)}
    enough = np.array([len(user) >= GROUPS[0] for user in data.users])
    users = [data.users[index] for index in enough.nonzero()[0]]
    for length in [length for length in LENGTHS if length <= longest and users]:
        cut = (
            np.array([len(user) - TEST > length for user in users]) if length < longest else np.zeros(len(users), bool)
        )
        found[str(length)] = ranks = found["test"][enough]
        ranks[cut] = ranked([users[index] for index in cut.nonzero()[0]], length)
    line.close()
    partial = file.with_name(f".{file.name}")  # an interrupted write leaves the kept file as it was
    np.savez(partial, key=np.array(key), **found)
    partial.replace(file)
    return found


def _digest(data: Histories) -> str:
    """Of all behaviours."""
    digest = hashlib.sha256()
    for user in data.users:
        digest.update(np.int64(len(user)).tobytes())
        for column in (user.items, user.actions, user.times):
            digest.update(column.astype(np.int64).tobytes())
    return digest.hexdigest()


def by_group(data: Histories, found: dict[int, Floats]) -> dict[str, dict[int, Floats]]:
    """For each group of users: length → NDCG@10 of each user. found: of users with GROUPS[0] behaviours or more."""
    counts = np.array([len(user) for user in data.users if len(user) >= GROUPS[0]])
    groups: dict[str, dict[int, Floats]] = {}
    for least in GROUPS:
        chosen = counts >= least
        if chosen.any():
            name = f"users with {least:,} behaviours or more ({chosen.sum():,})"
            groups[name] = {length: values[chosen] for length, values in found.items()}
    return groups


class Gain(NamedTuple):
    """A mean difference, and a 95 % interval of it."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def paired_gain(longer: Floats, shorter: Floats, resamples: int = 2000, seed: int = 0) -> Gain:
    """The mean of longer − shorter, (users,) each, with a percentile interval from resampled users (bootstrap).

    Paired: both are of the same users, so that differences between users do not widen the interval.
    """
    difference = longer - shorter
    draw = np.random.default_rng(seed)
    means = [difference[draw.integers(0, len(difference), len(difference))].mean() for _ in range(resamples)]
    low, high = np.percentile(means, [2.5, 97.5])
    return Gain(float(difference.mean()), float(low), float(high))
