"""When a process that ended is started again. Knows nothing of processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Pauses before restarts double from the first to the last of these; a process that ran for CALM_S starts over.
FIRST_S: Final = 0.5
MOST_S: Final = 30.0
CALM_S: Final = 60.0
#: Exit codes that a restart cannot mend (docs/operations.md): stopped when asked, a wrong command line, superseded.
FINAL: Final = frozenset({0, 2, 3})


@dataclass
class Restarts:
    """One process's restarts."""

    count: int = 0
    _pause_s: float = FIRST_S

    def pause_s(self, exit_code: int, ran_s: float) -> float | None:
        """Seconds to wait before starting it again, having run so long; None: not again."""
        if exit_code in FINAL:
            return None
        if ran_s >= CALM_S:
            self._pause_s = FIRST_S
        pause, self._pause_s = self._pause_s, min(MOST_S, 2 * self._pause_s)
        self.count += 1
        return pause
