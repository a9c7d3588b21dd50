"""Scenarios: the sections [scenario.NAME] of the fleet's file, and the settings of what serves one."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.routes import read_routes, write_routes
from relaygr_stream.bus.topics import verify_topics
from relaygr_stream.cli.config_table import render_settings_table
from relaygr_stream.cli.explain_table import as_json, as_table
from relaygr_stream.cli.main import main
from relaygr_stream.cli.up import Planned, plan
from relaygr_stream.errors import ConfigError
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.ops.children import write_settings
from relaygr_stream.ops.scenarios import make_groups
from relaygr_stream.settings import Scenario, Settings
from relaygr_stream.settings.load import FIELDS, load_settings
from relaygr_stream.settings.scenarios import MAX_SCENARIOS, MAX_SHARING, NAME, RESERVED, groups_of, scenario_of
from relaygr_stream.settings.schema import Kafka, Telemetry
from relaygr_stream.telemetry.otlp import _resource
from relaygr_stream.telemetry.printable import render_plain
from relaygr_stream.trigger.core import TriggerCore
from relaygr_stream.trigger.decision import Policy
from relaygr_stream.trigger.explain import explain
from relaygr_stream.wire.routes import GroupName
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader
from tests.unit.trigger.parts import event

FLEET = """
[relay]
slo_ms = 40.0
[scenario.feed]
tenants = ["shop", "shop-eu"]
slo_ms = 50
model = "models/feed"
priority = 2
min_workers = 2
max_pinned_bytes = "64MiB"
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
        Scenario(
            name="feed",
            tenants=("shop", "shop-eu"),
            slo_ms=50.0,
            model="models/feed",
            priority=2,
            min_workers=2,
            max_pinned_bytes=64 << 20,
        ),
        Scenario(name="search", slo_ms=40.0),
    )
    sources = {value.field.key: value.source for value in config.values if value.field.key not in FIELDS}
    assert sources["scenario.feed.slo_ms"] == str(path)
    assert sources["scenario.search.slo_ms"] == "relay.slo_ms"
    assert sources["scenario.search.lead_ms"] == "default"
    assert len(sources) == 3 * 9
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
        ("[scenario.feed]\nmax_pinned_bytes = -1\n", "`scenario.feed.max_pinned_bytes` = -1"),
        ("[scenario.feed]\npriority = 1.5\n", "`scenario.feed.priority` = 1.5"),
        ("[scenario.feed]\ntenants = ['']\n", "`scenario.feed.tenants` = ['']"),
        ("[scenario.feed]\ntenants = [3]\n", "`scenario.feed.tenants` = [3]"),
        ("[scenario.feed]\ntenants = ['a\\tb']\n".replace("'", '"'), "`scenario.feed.tenants`"),
        ("[scenario.feed]\ntenants = ['\ufeffa']\n", "has the invisible character U+FEFF"),
        ("[scenario]\nfeed = 3\n", "`scenario.feed` is no section; write [scenario.NAME], with"),
        ("[scenario]\ntenants = ['shop']\n", "`scenario.tenants` is no section; write [scenario.NAME], with"),
        ("scenario = 3\n", "`scenario` stands outside any section; scenarios stand in a file"),
        ("[[scenario]]\nname = 'feed'\n", "`scenario` stands outside any section; scenarios stand in a file"),
        ("[scenarios.feed]\n", "no setting `scenarios.feed`; scenarios stand in a file"),
        ("[scenario.feed]\n[scenario.feed]\n", "twice (at line 2, column 15); TOML looks like the line [kafka]"),
        (f"[scenario.feed]\nmin_workers = {'9' * 5000}\n", "not TOML: Exceeds the limit (4300 digits)"),
        (f"[scenario.{'a' * 10**5}]\n", f"[scenario.{'a' * 80}… (100000 characters)]: a scenario's name is part"),
        (f"[scenario.feed]\n{'a' * 10**5} = 1\n", f"no key `scenario.feed.{'a' * 80}… (100000 characters)`"),
        (
            "".join(f"[scenario.s{n}]\n" for n in range(MAX_SCENARIOS + 1)),
            "fleet.toml: 257 sections [scenario.NAME], at most 256 are possible",
        ),
        ("[scenario.Feed]\n", "[scenario.Feed]: a scenario's name is part of its topics' names"),
        ("[scenario.'a.b']\n", "[scenario.a.b]"),
        ("[scenario.'']\n", "[scenario.]"),
        ("[scenario.-a]\n", "[scenario.-a]"),
        ("[scenario.'a\u00e4']\n", "[scenario.a\u00e4]"),
        ('[scenario."a\\n"]\n', "up to 24 of a–z, 0–9 and -"),
        (f"[scenario.{'a' * 25}]\n", "up to 24 of a–z, 0–9 and -"),
        *(
            (f"[scenario.{name}]\n", "not default, assignments, reserve or next; choose another one")
            for name in RESERVED
        ),
        (
            f"[kafka]\nprefix = '{'p' * 60}'\n[scenario.feed]\n",
            "has more than 64 characters; shorten the name or `kafka.prefix`",
        ),
        (
            "[scenario.feed]\ntenants = ['a', 'b']\n[scenario.ads]\ntenants = ['b']\n",
            "`scenario.ads.tenants` has 'b', which stands in [scenario.feed], too",
        ),
        ("[scenario.feed]\ntenants = ['a', 'a']\n", "`scenario.feed.tenants` has 'a', which stands twice"),
        (
            "[scenario.ads]\n[scenario.search]\nserved_by = 'feed'\n",
            "`scenario.search.served_by` = 'feed': no file has a section [scenario.feed]; scenarios with workers of "
            "their own are ads; name one, or leave out `served_by`",
        ),
        (
            "[scenario.search]\nserved_by = 'search'\n",
            "'search': that is itself, and has no workers; no scenario has workers; name one, or leave out `served_by`",
        ),
        ("[scenario.ads]\nserved_by = 'search'\n[scenario.search]\nserved_by = 'ads'\n", "is served by ads itself"),
        (
            "[scenario.ads]\nserved_by = 'search'\n[scenario.feed]\n[scenario.search]\nserved_by = 'feed'\n",
            "that is served by feed itself, and has no workers; scenarios with workers of their own are feed; name one",
        ),
        (
            "[scenario.feed]\n[scenario.search]\nserved_by = 'feed'\nmodel = 'demo'\n",
            "`scenario.search.model` = 'demo', and feed, whose workers serve search, has that of [model]; workers of a "
            "group have one model: leave out `model`, or leave out `served_by`",
        ),
        (
            "[scenario.feed]\nmodel = 'a'\n[scenario.search]\nserved_by = 'feed'\nmodel = 'b'\n",
            "`scenario.search.model` = 'b', and feed, whose workers serve search, has 'a'",
        ),
        (
            "[scenario.feed]\n[scenario.search]\nserved_by = 'feed'\nmin_workers = 1\n",
            "`scenario.search.min_workers`: search has no workers of its own, those of feed serve it; set "
            "`scenario.feed.min_workers`, or leave out `served_by`",
        ),
        (
            "[scenario.feed]\n" + "".join(f"[scenario.s{n}]\nserved_by = 'feed'\n" for n in range(MAX_SHARING)),
            f"{MAX_SHARING} name it; a group serves {MAX_SHARING} at most, its own included",
        ),
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


SHARED = """
[scenario.ads]
served_by = "feed"
slo_ms = 70.0
priority = 3
[scenario.feed]
slo_ms = 50.0
model = "models/feed"
min_workers = 2
[scenario.search]
served_by = "feed"
model = "models/feed"
slo_ms = 20.0
lead_ms = 80.0
[scenario.video]
"""


def test_scenarios_that_share_a_group_keep_their_slos_and_the_group_keeps_the_tightest(tmp_path: Path) -> None:
    config = load_settings([fleet(tmp_path, SHARED)], environ={})
    settings = config.settings
    feed, video = groups_of(settings.scenarios)
    assert feed == Scenario(name="feed", slo_ms=20.0, model="models/feed", lead_ms=80.0, priority=3, min_workers=2)
    assert video == next(each for each in settings.scenarios if each.name == "video")
    assert settings.serving("search") == settings.serving("feed") == settings.serving("ads")
    served = settings.serving("search")
    assert (served.scenario, served.kafka.prefix, served.relay.slo_ms) == ("feed", "relaygr.feed.", 20.0)
    assert served.model.checkpoint == "models/feed"
    assert [*served.sharing] == ["feed", "ads", "search"], "its own comes first"
    found = {name: served.slo_ms_of(name) for name in ("search", "feed", "ads", "video", "")}
    assert found == {"search": 20.0, "feed": 50.0, "ads": 70.0, "video": 50.0, "": 50.0}
    alone = settings.serving("video")
    assert (alone.sharing, alone.slo_ms_of("search"), settings.sharing) == ({}, 50.0, {})
    (model,) = (value for value in config.values if value.field.key == "scenario.ads.model")
    assert (model.value, model.source) == ("models/feed", "scenario.feed.model")
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


@pytest.mark.parametrize("command", [["worker"], ["trigger"], ["topics", "show"], ["explain", "--seconds", "1"]])
def test_a_process_of_a_scenario_that_no_file_names_ends_with_what_there_is(command: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [*command, "--scenario", "other", "--config", str(fleet(tmp_path))])
    assert result.exit_code != 0
    assert "no scenario 'other': no file has a section [scenario.other]; there are ads, feed, search" in result.output


def test_spans_of_a_process_name_its_scenario_once() -> None:
    pytest.importorskip("opentelemetry.sdk")
    assert _resource("worker", "feed").attributes["relaygr.scenario"] == "feed"
    assert "relaygr.scenario" not in _resource("worker", "").attributes


def test_explanations_have_a_column_of_scenarios_where_there_are_any() -> None:
    policy = Policy(stale_ms=1000.0, life_ms=2000.0, max_prefix_tokens=1000)
    core = TriggerCore(policy, OwnerDirectory(1000.0))
    core.take_lane(0)
    sent = (event(25), event(25, scenario="feed"))
    plain, named = (explain(core, 0, each, age_ms=0.0, now_s=0.0, at_s=0.0)[0] for each in sent)
    assert "scenario" not in render_plain(as_table([plain]))
    shown = render_plain(as_table([plain, named]))
    assert "scenario" in shown
    assert "feed" in shown
    assert "default" in shown
    assert '"scenario":"feed"' in as_json([named])


# ---- relaygr up --fleet ----


def test_each_scenario_has_a_trigger_and_its_workers_with_devices_and_ports_in_turn() -> None:
    scenarios = [Scenario(name="ads"), Scenario(name="feed", min_workers=2)]
    settings = Settings(telemetry=Telemetry(port=9000))
    assert plan("h", 0, scenarios, settings, "cuda:0, cuda:1", trigger=False) == [
        Planned("trigger-ads", "trigger", ("telemetry.port=9000",), "ads"),
        Planned("trigger-feed", "trigger", ("telemetry.port=9001",), "feed"),
        Planned("h-ads-0", "worker", ("telemetry.port=9002", "worker.name=h-ads-0", "worker.device=cuda:0"), "ads"),
        Planned("h-feed-0", "worker", ("telemetry.port=9003", "worker.name=h-feed-0", "worker.device=cuda:1"), "feed"),
        Planned("h-feed-1", "worker", ("telemetry.port=9004", "worker.name=h-feed-1", "worker.device=cuda:0"), "feed"),
    ]
    with_default = plan("h", 1, scenarios, Settings())
    assert [each.name for each in with_default] == [
        *("trigger", "trigger-ads", "trigger-feed", "h-0", "h-ads-0", "h-feed-0", "h-feed-1")
    ]
    assert with_default[4].arguments == ["--set", "worker.name=h-ads-0", "--scenario", "ads"]
    assert with_default[0].arguments == []


def test_devices_beyond_min_workers_get_workers_by_priority_and_a_planner_moves_them() -> None:
    scenarios = [Scenario(name="ads"), Scenario(name="feed", min_workers=2, priority=2)]
    settings = Settings(telemetry=Telemetry(port=9000))

    def names(devices: int, workers: int = 0) -> list[str]:
        listed = ",".join(f"cuda:{number}" for number in range(devices))
        return [each.name for each in plan("h", workers, scenarios, settings, listed, trigger=False)]

    triggers, least = ["trigger-ads", "trigger-feed"], ["h-ads-0", "h-feed-0", "h-feed-1"]
    assert names(3) == [*triggers, *least], "all scenarios have their least: nothing can move"
    assert names(4) == [*triggers, "planner", *least, "h-feed-2"]
    assert names(6) == [*triggers, "planner", *least[:1], "h-ads-1", *least[1:], "h-feed-2", "h-feed-3"]
    assert names(4, workers=1) == [*triggers, "h-0", *least]
    planner = plan("h", 0, scenarios, settings, "cpu,cpu,cpu,cpu", trigger=False)[2]
    assert planner == Planned("planner", "planner", ("telemetry.port=9002",))
    assert planner.arguments == ["--set", "telemetry.port=9002", "--mode", "act"]
    spared = plan("h", 0, scenarios, settings, "cpu,cpu,cpu,cpu,cpu", reserve=1, trigger=False)
    assert [each.name for each in spared[3:]] == [*least, "h-feed-2", "h-reserve-0"]
    assert spared[-1].arguments == [
        "--set",
        "telemetry.port=9007",
        "--set",
        "worker.name=h-reserve-0",
        "--set",
        "worker.device=cpu",
        "--reserve",
    ]
    assert [each.role for each in plan("h", 0, scenarios[:1], settings, reserve=1, trigger=False)].count("planner") == 1
    with pytest.raises(ConfigError, match="--reserve 2: 3 workers serve, and --devices has 4"):
        plan("h", 0, scenarios, settings, "cpu,cpu,cpu,cpu", reserve=2)
    alone = plan("h", 0, scenarios[:1], settings, "cpu,cpu", trigger=False)
    assert [each.role for each in alone] == ["trigger", "worker", "worker"], "a single scenario has nobody to give to"


def test_a_fleet_without_sections_is_said_before_anything_starts(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["up", "--fleet", str(fleet(tmp_path, ""))])
    assert result.exit_code == 1
    assert "fleet.toml: no section [scenario.NAME]; write one, or leave out --fleet" in result.output


async def test_the_groups_topics_and_routes_are_made_once_and_moved_users_stay(embedded_settings: Kafka) -> None:
    scenarios = (Scenario(name="ads"), Scenario(name="feed"))
    settings, said = Settings(kafka=embedded_settings, scenarios=scenarios), list[str]()
    topics, reader = load_topics(embedded_settings), StatusReader()
    await make_groups(settings, said.append)
    for name in ("ads", "feed"):
        await verify_topics(settings.serving(name).kafka, strict=True)
    known = await read_routes(embedded_settings, topics, reader)
    assert {name: routes.groups for name, routes in known.items()} == {"ads": ("ads",), "feed": ("feed",)}
    moved = known["feed"].moved("next", topics.lanes, 2500)
    async with Producer(embedded_settings, client_id="test") as producer:
        await write_routes(producer, topics, reader, moved, "feed")
    await make_groups(settings, said.append)
    assert await read_routes(embedded_settings, topics, reader) == {**known, "feed": moved}
    made = f"made {3 * len(topics.all) + 1} topics for scenarios ads, feed"
    assert said == [made, "the topics of scenarios ads, feed are there"]


async def test_routes_follow_a_scenario_to_the_group_that_the_file_names(embedded_settings: Kafka) -> None:
    feed, own, shared = Scenario(name="feed"), Scenario(name="search"), Scenario(name="search", served_by="feed")
    topics, reader = load_topics(embedded_settings), StatusReader()
    for search, group in ((own, "search"), (shared, "feed"), (shared, "feed"), (own, "search")):
        await make_groups(Settings(kafka=embedded_settings, scenarios=(feed, search)), lambda _: None)
        known = await read_routes(embedded_settings, topics, reader)
        assert {name: routes.groups for name, routes in known.items()} == {"feed": ("feed",), "search": (group,)}
    moved = known["search"].moved("next", topics.lanes, 2500)
    async with Producer(embedded_settings, client_id="test") as producer:
        await write_routes(producer, topics, reader, moved, "search")
    await make_groups(Settings(kafka=embedded_settings, scenarios=(feed, shared)), lambda _: None)
    assert (await read_routes(embedded_settings, topics, reader))["search"] == moved, "an operator's stay"
