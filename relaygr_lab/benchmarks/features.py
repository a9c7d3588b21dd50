"""What feature columns cost: bytes of a request, and the times to make it, to decode it and to embed it.

python relaygr_lab/benchmarks/features.py       prints the table; CHECK=1: non-zero, bounds not kept
A schema of n columns has a quarter each of the user, the behaviours, the candidates and candidate × user; half are
int32 categories, half float32 numbers, one in five of width 4. All sizes are measured in turns, on one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Final, get_args

import numpy as np
import torch
from judge import judge
from msgspec import UNSET
from msgspec.structs import replace

from relaygr_stream.models.api import ScoreInput
from relaygr_stream.models.hstu_model import HSTUConfig
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.loading import random_model
from relaygr_stream.settings.schema import Relay
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.features import FeatureColumn, FeatureSchema, FeatureTables, Of
from relaygr_stream.wire.messages import RankingRequest
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION, Record
from relaygr_stream.worker.intake import Intake, IntakeLimits

COLUMNS: Final = (0, 10, 40, 120)
PREFIX, SUFFIX, CANDIDATES = 1024, 16, 200
ROUNDS: Final = 60
#: A request of 40 columns: its values are copied and compared, no more. Against the same request without features.
JUDGED_COLUMNS: Final = 40
DECODE_RATIO: Final = 1.5  # of decode time per byte
CPU: Final = torch.device("cpu")
ROUTE: Final = ((HEADER_CORRELATION, bytes(16)), (HEADER_REPLY_PARTITION, b"0"))


class Case:
    """A schema of so many columns, one request, and the model that reads it."""

    def __init__(self, count: int) -> None:
        of: tuple[Of, ...] = get_args(Of)
        self.count = count
        self.schema = FeatureSchema(_column(of[index % 4], index) for index in range(count))
        rng = np.random.default_rng(1)
        rows = {"user": 1, "behaviour": PREFIX + SUFFIX, "candidate": CANDIDATES, "cross": CANDIDATES}
        values: dict[str, Any] = {
            one.name: rng.integers(0, 1000, (rows[one.of], one.width)).astype(one.dtype) for one in self.schema.columns
        }
        self.behaviours = {one.name: values.pop(one.name) for one in self.schema.table("behaviour")}
        self.others = values
        self.items = rng.integers(0, 5000, PREFIX + SUFFIX)
        self.candidates = rng.integers(0, 5000, CANDIDATES)
        self.record = Record("ranking", 0, 0, 0, b"user", encode(self.made()), ROUTE)
        self.intake = Intake(IntakeLimits(Relay(), 1000.0, 1, 1 << 30), features=self.schema)
        self.task = self.intake.ranking(self.record, self.intake.route(self.record), time.monotonic()).task
        config = HSTUConfig(
            layers=2, dim=256, heads=4, dqk=64, dv=64, vocab=5000, max_positions=2048, scale_tokens=2048,
            tasks=("click",), features=self.schema.columns,
        )  # fmt: skip
        self.model = random_model(config, 1).place(CPU, torch.float32)
        self.region = KVRegion.new(self.model.layout, PREFIX + 1)  # the user's token

    def made(self) -> RankingRequest:
        """The request out of arrays, as a client makes it."""
        tables = self.schema.pack(self.others, {"user": 1, "candidate": CANDIDATES})
        return RankingRequest(
            request_id="r",
            user_id="user",
            prefix=self._behaviours(slice(0, PREFIX)),
            suffix=self._behaviours(slice(PREFIX, None)),
            candidates=pack_items(self.candidates),
            columns=FeatureTables(self.schema.digest, **tables) if self.schema else UNSET,
        )

    def _behaviours(self, rows: slice) -> Behaviours:
        items = self.items[rows]
        plain = Behaviours.from_arrays(
            items, np.ones(len(items), np.uint8), np.arange(len(items)) + 1000 * (rows.start or 0)
        )
        if not self.schema:
            return plain
        values = {name: column[rows] for name, column in self.behaviours.items()}
        return replace(plain, columns=self.schema.pack(values, {"behaviour": len(items)})["behaviour"])

    def encode(self) -> None:
        encode(self.made())

    def decode(self) -> None:
        self.intake.ranking(self.record, self.intake.route(self.record), time.monotonic())

    def prefill(self) -> None:
        self.region.length = 0
        self.model.prefill(self.region, self.task.tokens)

    def score(self) -> None:
        self.model.score([ScoreInput(self.region, self.task.suffix, self.task.candidates, self.task.features)])


def _column(of: Of, index: int) -> FeatureColumn:
    category = index // 4 % 2 == 0
    return FeatureColumn(
        name=f"feature_{index}",
        of=of,
        dtype="int32" if category else "float32",
        width=4 if index % 5 == 4 else 1,
        rows=1000 if category else 0,
    )


def main() -> list[str]:
    torch.set_num_threads(1)
    cases = [Case(count) for count in COLUMNS]
    works: dict[str, Callable[[Case], None]] = {
        "make": Case.encode, "decode": Case.decode, "prefill": Case.prefill, "score": Case.score,
    }  # fmt: skip
    times: dict[tuple[int, str], list[float]] = {(case.count, name): [] for case in cases for name in works}
    for turn in range(ROUNDS + 5):
        for case in cases:
            for name, work in works.items():
                begun = time.perf_counter()
                work(case)
                if turn >= 5:  # first calls are slow
                    times[case.count, name].append((time.perf_counter() - begun) * 1e3)
    median = {key: statistics.median(taken) for key, taken in times.items()}
    plain = len(cases[0].record.value or b"")
    print(f"A ranking request of {PREFIX} + {SUFFIX} behaviours and {CANDIDATES} candidates; median ms of {ROUNDS}\n")
    print(f"{'columns':>8} {'KiB':>7} {'':>6} " + "".join(f"{name:>9} {'':>6} " for name in works))
    ratios: dict[int, tuple[float, float]] = {}
    for case in cases:
        size = len(case.record.value or b"")
        cells = "".join(
            f"{median[case.count, name]:9.3f} {median[case.count, name] / median[0, name]:5.2f}× " for name in works
        )
        print(f"{case.count:8} {size / 1024:7.1f} {size / plain:5.2f}× {cells}")
        ratios[case.count] = size / plain, median[case.count, "decode"] / median[0, "decode"]
    nbytes, decode = ratios[JUDGED_COLUMNS]
    broken = [f"decode of 40 columns: {decode:.2f}× the time; bound: {DECODE_RATIO:g} × {nbytes:.2f}× of the bytes"]
    return broken if decode > DECODE_RATIO * nbytes else []


if __name__ == "__main__":
    judge(main)
