"""A worker's pinned bytes are used by whoever asks, however many lanes they are granted to."""

from __future__ import annotations

from relaygr_lab.simulate.report import summary
from relaygr_lab.simulate.run import run_group

from tests.unit.simulate.scenes import scenario


def test_eight_lanes_use_the_room_for_six_prefixes_that_none_of_them_has_alone() -> None:
    """Eight separate rooms refused three of four requests; one lane that has all of it refuses one of four."""
    flags = {"worker.hbm_bytes": "24MiB", "trigger.delegate": "false"}
    refused = {}
    for lanes in (1, 8):
        scene = scenario(flags, rate=20.0, workers=1, sample=1, lanes_per_worker=lanes, seconds=20.0)
        found = summary(scene, run_group(scene, scene.groups[0]))
        refused[lanes] = found["decisions"].get("over_footprint", 0) / found["requests"]
    assert refused[8] < refused[1] + 0.3, refused
