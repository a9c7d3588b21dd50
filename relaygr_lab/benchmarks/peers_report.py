"""What the bench of peers found: a table as it comes, a JSON report, and the judgement. Knows no runtime."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

#: Where the best peer is this far from the floor, there is room to be clearly ahead of it.
ROOM_OF_FLOOR: Final = 1.9
#: How far ahead ours has to be then: the best peer's shortest time / ours.
AHEAD: Final = 1.5


@dataclass
class Result:
    """Of one peer, or of ours, in one row: seconds of its runs, or the reason why there are none.

    unsupported: the peer has no such row, which is no failure.
    """

    name: str
    times: list[float] = field(default_factory=list)
    problem: str = ""
    unsupported: bool = False
    version: str = ""
    deviation: float = 0.0  # from our outputs, relative to the largest of them

    @property
    def shortest(self) -> float:
        return min(self.times)

    @property
    def ran(self) -> bool:
        return bool(self.times) and not self.problem


@dataclass
class Row:
    """One operation: ours, peers, and the floor in seconds, all from one run."""

    dtype: str
    operation: str
    floor: float
    ours: Result
    peers: list[Result]

    @property
    def name(self) -> str:
        return f"{self.dtype}: {self.operation}"

    def best(self) -> Result | None:
        """The peer with the shortest time; None where none ran."""
        return min((peer for peer in self.peers if peer.ran), key=lambda peer: peer.shortest, default=None)

    def broken(self) -> list[str]:
        """The bounds that this row does not keep, in words."""
        found = [f"{self.name}: {each.name} failed: {each.problem}" for each in self._failed()]
        best = self.best()
        if best is None:
            return [*found, f"{self.name}: no peer ran, so nothing is compared"]
        if not self.ours.ran:
            return found
        ahead = best.shortest / self.ours.shortest
        room = best.shortest / self.floor
        if ahead <= 1:
            found.append(f"{self.name}: {best.name} takes {ahead:.2f} × ours; bound: above 1")
        elif room >= ROOM_OF_FLOOR and ahead < AHEAD:
            found.append(
                f"{self.name}: {best.name} takes {room:.2f} × the floor and {ahead:.2f} × ours; bound: at least {AHEAD}"
            )
        return found

    def _failed(self) -> list[Result]:
        return [each for each in (self.ours, *self.peers) if each.problem and not each.unsupported]

    def lines(self) -> list[str]:
        """The row's part of the table."""
        return [self._line(each) for each in (self.ours, *self.peers)]

    def _line(self, result: Result) -> str:
        start = f"{self.operation if result is self.ours else '':22} {result.name:14}"
        if not result.ran:
            return f"{start} {'–':>9}  {result.problem}" if result.unsupported else f"{start} failed: {result.problem}"
        ratio = f"{result.shortest / self.ours.shortest:9.2f}" if self.ours.ran else f"{'–':>9}"
        return (
            f"{start} {result.shortest * 1e3:9.2f} {statistics.median(result.times) * 1e3:9.2f} {ratio} "
            f"{result.shortest / self.floor:8.2f} {len(result.times):6} {result.deviation:9.1e}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype, "operation": self.operation, "floor_ms": self.floor * 1e3,
            "results": [_result(each) for each in (self.ours, *self.peers)], "broken": self.broken(),
        }  # fmt: skip


def head(dtype: str) -> str:
    return (
        f"\n{dtype}\n{'':22} {'':14} {'ms':>9} {'median':>9} {'/ ours':>9} {'× floor':>8} {'runs':>6} {'deviation':>9}"
    )


def broken(rows: Sequence[Row]) -> list[str]:
    return [bound for row in rows for bound in row.broken()]


def _result(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = {"name": result.name, "version": result.version}
    if not result.ran:
        return found | {"problem": result.problem, "unsupported": result.unsupported}
    return found | {
        "ms": result.shortest * 1e3, "median_ms": statistics.median(result.times) * 1e3, "runs": len(result.times),
        "deviation": result.deviation,
    }  # fmt: skip
