"""When the bench of restarts says that a file helps, does not, or that its counts do not tell."""

from __future__ import annotations

import pytest
from change_restart import Run, verdict
from relaygr_lab.verdicts import NotValid


def run(missed: int, returns: int, failed: int = 0) -> Run:
    """One with so many misses."""
    return Run(5.0, ["full"] * missed + ["hbm"] * (returns - missed), failed)


@pytest.mark.parametrize(
    ("file", "none", "missed"),
    [
        (run(18, 150), run(55, 150), []),
        (run(40, 150, 1), run(110, 150), ["1 rankings failed"]),
        (run(90, 150), run(95, 150), ["at most 0.5 is wanted"]),
    ],
)
def test_what_is_missed(file: Run, none: Run, missed: list[str]) -> None:
    found = verdict("kill", file, none)
    assert len(found) == len(missed)
    assert all(part in line for part, line in zip(missed, found, strict=True))


@pytest.mark.parametrize(("file", "none"), [(run(9, 95), run(17, 76)), (run(0, 95), run(0, 76))])
def test_misses_that_do_not_tell_half_from_all_are_not_valid(file: Run, none: Run) -> None:
    with pytest.raises(NotValid, match=r"too few to tell 0\.5 from 1"):
        verdict("kill", file, none)


def test_repeats_count_together() -> None:
    both = run(9, 95) + run(17, 76, 2)
    assert (both.missed, len(both.returns), both.failed) == (26, 171, 2)
