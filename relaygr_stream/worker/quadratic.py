"""The quadratic that is nearest to some points in relative terms, with no coefficient below zero.

Worked out in plain numbers: for a dozen points numpy takes longer to be called than the sums take, and it is asked for
up to four times a second, in each of a simulation's thousand workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from relaygr_stream.worker.fit import LEAST_MS, Features

#: Of the sums' diagonal: what points do not determine comes out near zero, and nothing is divided by it.
RIDGE: Final = 1.0 + 1e-12


def relative_quadratic(points: Iterable[tuple[float, float]]) -> Features:
    """(a, b, c) of a + b·x + c·x² = milliseconds, each ≥ 0; points: (x, milliseconds), at least one, x > 0."""
    # With w = 1 / milliseconds, relative errors are those of w·a + w·b·x + w·c·x² = 1: sums of w²·xⁿ and of w·xⁿ.
    s0 = s1 = s2 = s3 = s4 = 0.0
    t0 = t1 = t2 = 0.0
    for x, ms in points:
        u = 1.0 / (ms if ms > LEAST_MS else LEAST_MS)
        v = u * x
        w = v * x
        s0 += u * u
        s1 += u * v
        s2 += v * v
        s3 += v * w
        s4 += w * w
        t0 += u
        t1 += v
        t2 += w
    squares, sums = ((s0 * RIDGE, s1, s2), (s1, s2 * RIDGE, s3), (s2, s3, s4 * RIDGE)), (t0, t1, t2)
    used = [0, 1, 2]
    while True:
        solved = _solved([[squares[row][column] for column in used] for row in used], [sums[row] for row in used])
        least = min(solved)
        if least >= 0 or len(used) == 1:
            break
        del used[solved.index(least)]
    fitted = [0.0, 0.0, 0.0]
    for index, value in zip(used, solved, strict=True):
        fitted[index] = max(value, 0.0)
    return fitted[0], fitted[1], fitted[2]


def _solved(squares: list[list[float]], sums: list[float]) -> list[float]:
    """By elimination; a matrix of sums of squares needs no pivots. Changes what it is given."""
    size = len(sums)
    for column in range(size):
        pivot = squares[column]
        for row in range(column + 1, size):
            part = squares[row][column] / pivot[column]
            for each in range(column + 1, size):
                squares[row][each] -= part * pivot[each]
            sums[row] -= part * sums[column]
    for row in reversed(range(size)):
        for column in range(row + 1, size):
            sums[row] -= squares[row][column] * sums[column]
        sums[row] /= squares[row][row]
    return sums
