"""What the report says of an overloaded fleet stays within its bounds."""

from __future__ import annotations

from relaygr_lab.simulate.report import summary
from relaygr_lab.simulate.run import run_group

from tests.unit.simulate.scenes import scenario


def test_a_device_is_busy_at_most_all_the_time_and_pins_stay_within_their_share() -> None:
    """Work after the measured time once counted as in it, and what waiting rankings hold as pinned by signals."""
    scene = scenario(rate=900.0, seconds=1.0, traffic={"return_s": 0.5})
    story = run_group(scene, scene.groups[0])
    assert 0.95 < story.busy.max() <= 1.0
    worker = scene.settings.worker
    assert 0 < story.pinned_bytes.max() <= worker.pinned_share * worker.hbm_bytes
    assert story.held_bytes.max() > worker.pinned_share * worker.hbm_bytes
    assert story.held_bytes.max() <= worker.hbm_bytes
    found = summary(scene, story)
    assert (found["pinned_bytes_most"], found["held_bytes_most"]) == (story.pinned_bytes.max(), story.held_bytes.max())
