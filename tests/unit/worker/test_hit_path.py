"""How long the way of a hit through the code is."""

from __future__ import annotations

from tests.unit.worker.hit_path import trace_hit

#: What `make trace-hit` prints: a change that makes the way longer says why it must; one that shortens it lowers these.
MOST_FUNCTIONS, MOST_FILES, MOST_HANDS = 80, 29, 21


async def test_a_hit_goes_through_no_more_code_than_it_did() -> None:
    path = await trace_hit()
    files = {each.file for each in path.functions}
    assert len(path.functions) <= MOST_FUNCTIONS and len(files) <= MOST_FILES and len(path.hands) <= MOST_HANDS, path
