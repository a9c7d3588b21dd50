from __future__ import annotations

import pytest
from relaygr_lab.bench.modes import (
    CACHE,
    FLEET_MODES,
    FULL,
    MODES,
    RELAY,
    RELAY_HBM,
    Mode,
    apply_mode,
    modes_named,
)

from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.schema import Settings


def test_names_select_in_the_order_of_the_table() -> None:
    assert modes_named("relay, full") == (FULL, RELAY)
    assert modes_named(",".join(mode.name for mode in MODES)) == MODES


@pytest.mark.parametrize(("names", "message"), [("full,speed", "speed: no such mode"), ("relay", "`full` is the base")])
def test_a_wrong_list_says_what_is_wrong(names: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        modes_named(names)


def test_modes_change_the_worker_only_as_they_say() -> None:
    settings = Settings()
    assert apply_mode(RELAY, settings) == apply_mode(FULL, settings) == apply_mode(CACHE, settings)
    assert apply_mode(RELAY_HBM, settings).worker.dram_bytes == 0
    assert apply_mode(RELAY, settings).worker.dram_bytes == settings.worker.dram_bytes


@pytest.mark.parametrize("mode", FLEET_MODES)
def test_a_mode_changes_settings_that_there_are(mode: Mode) -> None:
    changed = apply_mode(mode, Settings())
    for name, value in mode.overrides.items():
        section, _, key = name.partition(".")
        assert getattr(getattr(changed, section), key) == value
        assert getattr(getattr(Settings(), section), key) != value
