"""When the bench of restarts says that a file helps, does not, or that its counts do not tell."""

from __future__ import annotations

import pytest
from change_restart import Run, verdict
from relaygr_lab.verdicts import NotValid


def run(misses: int, returns: int, failed: int = 0) -> Run:
    """One with so many misses."""
    return Run(5.0, ["full"] * misses + ["hbm"] * (returns - misses), failed)


@pytest.mark.parametrize(
    ("file", "none", "broken"),
    [
        (run(18, 150), run(55, 150), []),
        (run(40, 150, 1), run(110, 150), ["1 rankings failed"]),
        (run(90, 150), run(95, 150), ["bound: at most 0.5"]),
    ],
)
def test_bounds_not_kept(file: Run, none: Run, broken: list[str]) -> None:
    found = verdict("kill", file, none)
    assert len(found) == len(broken)
    assert all(part in line for part, line in zip(broken, found, strict=True))


@pytest.mark.parametrize(("file", "none"), [(run(9, 95), run(17, 76)), (run(0, 95), run(0, 76))])
def test_misses_that_do_not_tell_half_from_all_are_not_valid(file: Run, none: Run) -> None:
    with pytest.raises(NotValid, match=r"too few to tell 0\.5 from 1"):
        verdict("kill", file, none)


def test_repeats_count_together() -> None:
    both = run(9, 95) + run(17, 76, 2)
    assert (both.misses, len(both.returns), both.failed) == (26, 171, 2)
