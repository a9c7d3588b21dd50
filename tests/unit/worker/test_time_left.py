"""What a forwarded ranking states as its timeout."""

from __future__ import annotations

import numpy as np
import pytest

from relaygr_stream.engine.commands import RankTask, Times
from relaygr_stream.models.api import Tokens
from relaygr_stream.worker.forwarding import time_left_ms


def test_the_age_at_arrival_and_the_time_here_are_spent() -> None:
    none = Tokens.zeros(0)
    times = Times(arrived=10.0, due=11.0, deadline=11.0, timeout_ms=1000.0, age_ms=300.0)
    task = RankTask("r", "u", 0, none, none, np.zeros(1, np.int64), times, full=False)
    assert time_left_ms(task, now=10.25) == pytest.approx(450.0)
