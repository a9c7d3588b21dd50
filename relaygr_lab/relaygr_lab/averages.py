"""The times over which the serving code averages are constants. Where time runs slower or faster, they do so, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from relaygr_stream.bus import loads
from relaygr_stream.engine import budgets
from relaygr_stream.worker import fair_share

#: The constants, in seconds: of a device's busy share, of lanes' loads, and of a worker's asking for other lanes.
AVERAGES: Final = (
    (budgets, "AVERAGE_S"), (loads, "AVERAGE_S"), (loads, "LEAST_S"), (fair_share, "ASK_S"),
)  # fmt: skip


@contextmanager
def stretched(factor: float) -> Iterator[None]:
    """Within it, this process averages over so many times as long. Not for two threads at once."""
    before = [getattr(module, name) for module, name in AVERAGES]
    try:
        for (module, name), seconds in zip(AVERAGES, before, strict=True):
            setattr(module, name, factor * seconds)
        yield
    finally:
        for (module, name), seconds in zip(AVERAGES, before, strict=True):
            setattr(module, name, seconds)
