"""What to do with rankings that would be late: answer late, refuse them, or rank with the newest behaviours alone.

    python -m examples.movielens.overload --data FILE --checkpoint FOLDER [--load 2.0] [--requests 300]

The same requests arrive at the same random times, more than one worker can infer in full, three times: with all the
time there is, with a deadline, and with a deadline and `worker.truncate_to`. Nothing is announced, as after a
lost cache. NDCG@10 is that of the test item among the request's candidates: `answered` over all answers, late ones too;
`of all` over all requests: one without an answer in time is ranked by popularity, as its caller may do.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from examples.movielens.data import DataError, Histories, History, Ints, check_same_rows, exit_code, read_histories
from examples.movielens.evaluate import TEST, behaviours_of, ndcg, popularity, rank_of, split
from examples.movielens.serve import TIMEOUT_S, running, settings_for
from relaygr_stream.client import RelayClient, Request
from relaygr_stream.errors import Overloaded, RelayError
from relaygr_stream.models.loading import load_checkpoint
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.worker import Worker

#: Candidates of a request: the test item and others drawn from the catalogue.
CANDIDATES: Final = 200
#: Requests, one at a time, that find out how long full inference takes; as many before them are warm-up.
ALONE: Final = 30
#: The deadline, in times of a request that is alone.
DEADLINE: Final = 3.0
#: worker.truncate_to of the third way: the default.
NEWEST: Final = Worker().truncate_to
WAYS: Final = ("full, late or not", "deadline, refused", f"deadline, newest {NEWEST}")


@dataclass
class Outcome:
    """What one way of serving gave. ranks (requests,): -1 without an answer. in_time (requests,)."""

    ranks: Ints
    in_time: npt.NDArray[np.bool_]
    seconds: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)  # behaviours that truncated rankings had

    def line(self, name: str, popular: Ints) -> str:
        """The line of the table. popular (requests,): ranks by popularity."""
        total, came = len(self.ranks), self.ranks >= 0
        of_all = ndcg(np.where(self.in_time, self.ranks, popular))
        found = ndcg(np.maximum(self.ranks, 0))
        p50, p99 = np.percentile(self.seconds, [50, 99]) * 1000 if self.seconds else (np.nan, np.nan)
        behaviours = f"{np.mean(self.lengths):.0f}" if self.lengths else "–"
        answered = f"{found[came].mean():.4f}" if came.any() else "–"
        return (
            f"{name:24} {self.in_time.mean():8.1%} {self.counts['truncated'] / total:10.1%} {behaviours:>11} "
            f"{answered:>9} {of_all.mean():9.4f} {p50:9.0f} {p99:8.0f}"
        )


HEADER: Final = (
    f"{'':24} {'in time':>8} {'truncated':>10} {'behaviours':>11} {'answered':>9} {'of all':>9} "
    f"{'P50, ms':>9} {'P99, ms':>8}"
)


def candidates_of(user: History, number: int, items: int) -> tuple[Ints, int]:
    """The request's candidates, none of them seen before, and the place of the test item, which is the first."""
    _, target, seen = split(user, TEST, len(user))
    others = np.setdiff1d(np.arange(items), np.append(seen, target))
    drawn = np.random.default_rng(number).permutation(others)[: CANDIDATES - 1]
    return np.append(target, drawn), 0


def popular_ranks(data: Histories, users: Sequence[History]) -> Ints:
    """The rank (users,) of each request's test item among its candidates by popularity."""
    scores, none = popularity(data, TEST), np.zeros(0, np.int64)
    asked = (candidates_of(user, number, len(data.names)) for number, user in enumerate(users))
    return np.array([rank_of(scores[candidates], place, none) for candidates, place in asked])


def request_of(client: RelayClient, name: str, user: History, longest: int) -> Request:
    """A request behind the user's history before the test item, not announced."""
    return client.request(name, behaviours_of(split(user, TEST, longest)[0]), candidates=CANDIDATES)


async def alone(settings: Settings, users: Sequence[History], items: int, longest: int, folder: Path) -> float:
    """Seconds at the client of a request in full that nothing else delays, the median."""
    seconds = []
    async with running(settings, folder) as pipeline:
        for number, user in enumerate((list(users) * (2 * ALONE))[: 2 * ALONE]):
            candidates, _ = candidates_of(user, number, items)
            request = request_of(pipeline.client, f"alone-{number}", user, longest)
            seconds.append((await request.rank(candidates)).latency_s)
    return float(np.median(seconds[ALONE:]))


async def offer(
    client: RelayClient,
    users: Sequence[History],
    items: int,
    longest: int,
    rate: float,
    deadline_s: float,
    wait_s: float,
) -> Outcome:
    """Send one request of each user at random times, `rate` a second. wait_s: how long an answer may take."""
    outcome = Outcome(np.full(len(users), -1, np.int64), np.zeros(len(users), bool))
    arrivals = np.cumsum(np.random.default_rng(1).exponential(1 / rate, len(users)))

    async def one(number: int, user: History) -> None:
        await asyncio.sleep(float(arrivals[number]))
        candidates, place = candidates_of(user, number, items)
        try:
            request = request_of(client, f"user-{number}", user, longest)
            ranking = await request.rank(candidates, timeout=wait_s)
        except RelayError as error:
            outcome.counts[type(error).__name__] += 1
            return
        outcome.counts[ranking.outcome] += 1
        outcome.seconds.append(ranking.latency_s)
        if ranking.outcome == "truncated":
            outcome.lengths.append(ranking.truncated_to)
        outcome.ranks[number] = rank_of(ranking.scores[:, 0], place, np.zeros(0, np.int64))
        outcome.in_time[number] = ranking.latency_s <= deadline_s

    await asyncio.gather(*(one(number, user) for number, user in enumerate(users)))
    return outcome


def _within(settings: Settings, slo_s: float, newest: int) -> Settings:
    return replace(
        settings,
        relay=replace(settings.relay, slo_ms=slo_s * 1e3),
        worker=replace(settings.worker, truncate_to=newest),
    )


async def compare(options: argparse.Namespace) -> list[str]:
    """The table's lines. Raises DataError or RelayError."""
    data, model = read_histories(options.data), load_checkpoint(options.checkpoint)
    items, longest = len(data.names), model.config.max_positions - 1
    check_same_rows(options.checkpoint, data)
    order = np.random.default_rng(0).permutation(len(data.users))
    users = [data.users[index] for index in order if len(data.users[index]) >= options.least][: options.requests]
    if not users:
        raise DataError(f"{options.data} has no user with {options.least} behaviours; name another --least")
    popular = popular_ranks(data, users)
    settings = settings_for(options.checkpoint, items, longest, threads=1)
    patient = _within(settings, TIMEOUT_S, newest=0)
    with tempfile.TemporaryDirectory() as folder:
        taken = await alone(patient, users, items, longest, Path(folder))
        deadline, rate = DEADLINE * taken, options.load / taken
        behaviours = np.mean([min(longest, len(user) - TEST) for user in users])
        lines = [
            f"{len(users)} requests, {CANDIDATES} candidates, {behaviours:.0f} behaviours on average; "
            f"alone {taken * 1000:.1f} ms, deadline {deadline * 1000:.1f} ms, {rate:.1f} requests/s",
            f"by popularity alone: NDCG@10 {ndcg(popular).mean():.4f}",
            HEADER,
        ]
        refusing, cutting = _within(settings, deadline, newest=0), _within(settings, deadline, newest=NEWEST)
        ways = zip(WAYS, (patient, refusing, cutting), (TIMEOUT_S, deadline, deadline), strict=True)
        for name, its_settings, wait in ways:
            async with running(its_settings, Path(folder)) as pipeline:
                for number, user in enumerate(users[:ALONE]):  # the worker's costs are known then
                    request = request_of(pipeline.client, f"warm-{number}", user, longest)
                    with suppress(Overloaded):
                        await request.rank(candidates_of(user, number, items)[0])
                found = await offer(pipeline.client, users, items, longest, rate, deadline, wait)
            lines.append(found.line(name, popular))
    return lines


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser("overload", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the file that the checkpoint was trained on")
    parser.add_argument("--checkpoint", type=Path, default=Path("out/movielens"), help="(default: %(default)s)")
    parser.add_argument(
        "--load", type=float, default=2.0, help="offered, in times of what one worker can infer in full"
    )
    parser.add_argument("--requests", type=int, default=300, help="requests, of as many users (default: %(default)s)")
    parser.add_argument(
        "--least", type=int, default=200, help="behaviours that a user must have (default: %(default)s)"
    )
    options = parser.parse_args(arguments)

    def work() -> int:
        print("\n".join(asyncio.run(compare(options))))
        return 0

    return exit_code(work, "stopped")


if __name__ == "__main__":
    sys.exit(main())
