"""How long the way of a hit through the code is."""

from __future__ import annotations

from tests.unit.worker.hit_path import trace_hit

#: What `make trace-hit` prints: a change that makes the way longer says why it must; one that shortens it lowers these.
MOST_FUNCTIONS, MOST_FILES = 127, 37


async def test_a_hit_goes_through_no_more_code_than_it_did() -> None:
    path = await trace_hit()
    assert path.functions <= MOST_FUNCTIONS and path.files <= MOST_FILES, path
