"""Scenarios: the sections [scenario.NAME] of the fleet's file, and the settings of what serves one."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from relaygr_stream.cli.config_table import render_settings_table
from relaygr_stream.errors import ConfigError
from relaygr_stream.ops.children import write_settings
from relaygr_stream.settings import Scenario, Settings
from relaygr_stream.settings.load import FIELDS, load_settings
from relaygr_stream.settings.scenarios import NAME, RESERVED, scenario_of
from relaygr_stream.telemetry.printable import render_plain
from relaygr_stream.wire.routes import GroupName

FLEET = """
[relay]
slo_ms = 40.0
[scenario.feed]
tenants = ["shop", "shop-eu"]
slo_ms = 50
model = "models/feed"
priority = 2
min_workers = 2
[scenario.ads]
tenants = "ads"
model = "ads.model:build"
lead_ms = 80.0
[scenario.search]
"""


def fleet(folder: Path, text: str = FLEET, name: str = "fleet.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_fleets_scenarios_stand_in_its_file(tmp_path: Path) -> None:
    path = fleet(tmp_path)
    config = load_settings([path], environ={})
    assert config.settings.scenarios == (
        Scenario(name="ads", tenants=("ads",), slo_ms=40.0, model="ads.model:build", lead_ms=80.0),
        Scenario(name="feed", tenants=("shop", "shop-eu"), slo_ms=50.0, model="models/feed", priority=2, min_workers=2),
        Scenario(name="search", slo_ms=40.0),
    )
    sources = {value.field.key: value.source for value in config.values if value.field.key not in FIELDS}
    assert sources["scenario.feed.slo_ms"] == str(path)
    assert sources["scenario.search.slo_ms"] == "relay.slo_ms"
    assert sources["scenario.search.lead_ms"] == "default"
    assert len(sources) == 3 * 6
    assert "scenario.ads.priority" in render_plain(render_settings_table(config))
    assert [scenario_of(config.settings.scenarios, tenant) for tenant in ("shop-eu", "ads", "else", "")] == [
        *("feed", "ads", "", "")
    ]


def test_without_sections_nothing_is_other_than_it_was() -> None:
    assert load_settings(environ={}).settings == Settings()
    assert (Settings().scenarios, Settings().scenario) == ((), "")
    assert not any(key.startswith("scenario") for key in FIELDS)


def test_a_later_file_counts_for_the_keys_that_it_has(tmp_path: Path) -> None:
    first = fleet(tmp_path)
    second = fleet(tmp_path, '[scenario.feed]\nslo_ms = 30.0\n[scenario.ads]\ntenants = ["ads", "more"]\n', "own.toml")
    ads, feed, _ = load_settings([second], environ={"RELAYGR_CONFIG": str(first)}).settings.scenarios
    assert (feed.slo_ms, feed.min_workers) == (30.0, 2)
    assert (ads.tenants, ads.lead_ms) == (("ads", "more"), 80.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[scenario.feed]\nslo = 1\n", "fleet.toml: no key `scenario.feed.slo`; a scenario has tenants, slo_ms, model"),
        ("[scenario.feed]\nname = 'x'\n", "no key `scenario.feed.name`"),
        ("[scenario.feed]\nslo_ms = 'fast'\n", "fleet.toml: `scenario.feed.slo_ms` = 'fast'"),
        ("[scenario.feed]\nslo_ms = nan\n", "`scenario.feed.slo_ms` = nan"),
        ("[scenario.feed]\nmin_workers = 0\n", "`scenario.feed.min_workers` = 0"),
        ("[scenario.feed]\npriority = 1.5\n", "`scenario.feed.priority` = 1.5"),
        ("[scenario.feed]\ntenants = ['']\n", "`scenario.feed.tenants` = ['']"),
        ("[scenario.feed]\ntenants = [3]\n", "`scenario.feed.tenants` = [3]"),
        ("[scenario.feed]\ntenants = ['a\\tb']\n".replace("'", '"'), "`scenario.feed.tenants`"),
        ("[scenario.feed]\ntenants = ['\ufeffa']\n", "has the invisible character U+FEFF"),
        ("[scenario]\nfeed = 3\n", "`scenario.feed` is no section; write [scenario.feed]"),
        ("scenario = 3\n", "`scenario` stands outside any section"),
        ("[scenario.Feed]\n", "[scenario.Feed]: a scenario's name is part of its topics' names"),
        ("[scenario.'a.b']\n", "[scenario.a.b]"),
        ("[scenario.'']\n", "[scenario.]"),
        ("[scenario.-a]\n", "[scenario.-a]"),
        ("[scenario.'a\u00e4']\n", "[scenario.a\u00e4]"),
        ('[scenario."a\\n"]\n', "up to 24 of a–z, 0–9 and -"),
        (f"[scenario.{'a' * 25}]\n", "up to 24 of a–z, 0–9 and -"),
        ("[scenario.default]\n", "not default or next; choose another one"),
        ("[scenario.next]\n", "not default or next; choose another one"),
        (
            f"[kafka]\nprefix = '{'p' * 60}'\n[scenario.feed]\n",
            "has more than 64 characters; shorten the name or `kafka.prefix`",
        ),
        (
            "[scenario.feed]\ntenants = ['a', 'b']\n[scenario.ads]\ntenants = ['b']\n",
            "`scenario.ads.tenants` has 'b', which stands in [scenario.feed], too",
        ),
        ("[scenario.feed]\ntenants = ['a', 'a']\n", "`scenario.feed.tenants` has 'a', which stands twice"),
    ],
)
def test_a_mistake_in_a_section_names_file_key_and_what_to_do(text: str, message: str, tmp_path: Path) -> None:
    path = fleet(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_settings([path], environ={})
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "environ", "what"),
    [
        ({"scenario.feed.slo_ms": "3"}, {}, "flag for scenario.feed.slo_ms: no setting `scenario.feed.slo_ms`"),
        ({}, {"RELAYGR_SCENARIO_FEED_SLO_MS": "3"}, "environment RELAYGR_SCENARIO_FEED_SLO_MS: no such setting"),
    ],
)
def test_neither_flag_nor_environment_makes_a_scenario(
    flags: dict[str, str], environ: dict[str, str], what: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{what}; scenarios stand in a file (--config, RELAYGR_CONFIG)")):
        load_settings(flags=flags, environ=environ)


def test_what_serves_a_scenario_has_its_group_slo_and_model(tmp_path: Path) -> None:
    settings = load_settings([fleet(tmp_path)], {"model.checkpoint": "own"}, {}).settings
    feed, ads, search = (settings.serving(name) for name in ("feed", "ads", "search"))
    assert (feed.scenario, feed.kafka.prefix, feed.relay.slo_ms) == ("feed", "relaygr.feed.", 50.0)
    assert (feed.model.checkpoint, feed.model.factory) == ("models/feed", "")
    assert (ads.model.checkpoint, ads.model.factory) == ("", "ads.model:build")
    assert (search.model.checkpoint, search.relay.slo_ms) == ("own", 40.0), "what the section leaves open is as set"
    with pytest.raises(ConfigError, match=re.escape("no scenario 'other'")) as caught:
        settings.serving("other")
    assert "there are ads, feed, search" in str(caught.value)


def test_children_with_exactly_these_settings_have_the_scenarios(tmp_path: Path) -> None:
    settings = load_settings([fleet(tmp_path)], environ={}).settings
    assert load_settings([write_settings(tmp_path / "child.toml", settings)], environ={}).settings == settings


@pytest.mark.parametrize("name", ["feed", "a", "9-a", "a" * 24, "", "A", "a_b", "a.b", "-a", "a\n", "a" * 25])
def test_a_scenarios_name_is_a_groups(name: str) -> None:
    def is_group(text: str) -> bool:
        try:
            return bool(msgspec.convert(text, GroupName))
        except msgspec.ValidationError:
            return False

    assert bool(NAME.fullmatch(name)) == is_group(name)
    assert all(NAME.fullmatch(each) for each in RESERVED)
