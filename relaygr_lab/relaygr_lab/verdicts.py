"""How a bench judges: by bounds, where CHECK=1 asks for it; else it prints figures alone. What it judges by must have
been measured: on a machine that is too slow or too busy it may not have been."""

from __future__ import annotations

import os
from collections.abc import Sequence, Sized
from typing import TypeVar

from relaygr_stream.errors import RelayError

SomeT = TypeVar("SomeT", bound=Sized)


class NotValid(RelayError):
    """A bench's figures are worth nothing; the message says why, and what to do."""


def judged(broken: Sequence[str]) -> bool:
    """With CHECK=1 in the environment: print the bounds not kept, one a line, and say whether there are any."""
    if os.environ.get("CHECK") != "1":
        return False
    for each in broken:
        print(f"not kept: {each}", flush=True)
    return bool(broken)


def some(values: SomeT, what: str) -> SomeT:
    """The values. Raises NotValid where there are none; what: they are."""
    if not len(values):
        raise NotValid(f"there are no {what}; give it more time, or a machine that is less busy")
    return values


def above_0(value: float, what: str) -> float:
    """The value, by which one divides. Raises NotValid where it is 0, or not a number; what: it is."""
    if not value > 0:
        raise NotValid(f"{what} is {value:g}; give it more time, or a machine that is less busy")
    return value
