"""What tells the time to those who look at it on their own: a limit, a silence, a bucket.

Whatever an event reaches is told the time with it (worker/core.py, trigger/core.py).
"""

from __future__ import annotations

from collections.abc import Callable

#: Returns seconds, of an epoch of its own, or Unix seconds (`wall`). Tests and the simulator hand over others.
Clock = Callable[[], float]
