"""What a bench judges by must have been measured: on a machine that is too slow or too busy it may not have been."""

from __future__ import annotations

from collections.abc import Sized
from typing import TypeVar

from relaygr_stream.errors import RelayError

SomeT = TypeVar("SomeT", bound=Sized)


class NotValid(RelayError):
    """A bench's figures are worth nothing; the message says why, and what to do."""


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
