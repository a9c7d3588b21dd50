"""Small logs in real formats, made by the tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from relaygr_stream.workload.logs import InteractionLog

USERS = 100
ITEMS = 400


def movielens_rows(users: int = USERS, items: int = ITEMS, per_user: int = 30, seed: int = 1) -> list[list[int]]:
    """Rows user, item, rating, Unix seconds, in the shuffled order of u.data; no user rates an item twice."""
    rng = random.Random(seed)
    rows = []
    for user in range(1, users + 1):
        time = 880_000_000 + rng.randrange(10_000_000)
        for item in rng.sample(range(1, items + 1), per_user):
            time += rng.choice([0, 0, 3, 40])  # bursts within a second, as in the real file
            rows.append([user, item, rng.randint(1, 5), time])
    rng.shuffle(rows)
    return rows


def write_udata(path: Path, rows: list[list[int]]) -> Path:
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    return path


class Interaction(NamedTuple):
    """One behaviour of one user."""

    user: str
    item: int
    action: int
    time_ms: int


def interactions(log: InteractionLog) -> Iterator[Interaction]:
    """Of one user after the other, in the order of time."""
    for code, user in enumerate(log.users):
        for at in range(int(log.offsets[code]), int(log.offsets[code + 1])):
            yield Interaction(user, int(log.items[at]), int(log.actions[at]), int(log.times[at]))
