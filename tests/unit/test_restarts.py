"""When a supervised process is started again."""

from __future__ import annotations

import pytest

from relaygr_stream.ops.supervisor import FIRST_PAUSE_S, MAX_PAUSE_S, STABLE_S, Restarts


def test_pauses_double_up_to_the_longest_and_start_over_after_a_calm_time() -> None:
    restarts = Restarts()
    pauses = [restarts.pause_s(1, 0.1) for _ in range(10)]
    assert pauses[:4] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert pauses[-1] == MAX_PAUSE_S
    assert restarts.pause_s(-9, STABLE_S) == FIRST_PAUSE_S
    assert restarts.count == 11


@pytest.mark.parametrize("code", [0, 2, 3])
def test_what_a_restart_cannot_mend_is_left(code: int) -> None:
    restarts = Restarts()
    assert restarts.pause_s(code, 1.0) is None
    assert restarts.count == 0
