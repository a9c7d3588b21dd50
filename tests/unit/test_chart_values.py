"""The values of the Helm chart: what they change, which are refused, and that they name what the program has."""

from __future__ import annotations

import json
import re
import tomllib

import yaml  # type: ignore[import-untyped]

from relaygr_stream.settings.load import FIELDS, load_settings
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.settings.section import section_fields
from tests.chart import CHART, ROOT, Object, container, of_kind, processes, render, rendered

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
PLAIN: Object = {"fleet": {"kafka": {"bootstrap": "kafka:9092"}}}
FEED: Object = {"fleet": {**PLAIN["fleet"], "scenario": {"feed": {}}}}


def test_a_new_scenario_restarts_no_worker_and_a_new_model_those_that_serve_it() -> None:
    fleet = FEED["fleet"]
    act = {"planner": {"mode": "act"}}
    feed, both, model, larger, acts, both_act, shared, tighter = (
        {name: each["metadata"]["annotations"]["relaygr/settings"] for name, each in processes(made).items()}
        for made in render(
            FEED,
            {"fleet": {**fleet, "scenario": {"feed": {"priority": 2}, "ads": {}}}},
            {"fleet": {**fleet, "scenario": {"feed": {"priority": 2, "model": "demo"}, "ads": {}}}},
            {"fleet": {**fleet, "relay": {"max_candidates": 512}}},
            FEED | act,
            {"fleet": {**fleet, "scenario": {"feed": {}, "ads": {}}}} | act,
            {"fleet": {**fleet, "scenario": {"feed": {}, "ads": {"served_by": "feed"}}}},
            {"fleet": {**fleet, "scenario": {"feed": {}, "ads": {"served_by": "feed", "slo_ms": 9}}}},
        )
        if not isinstance(made, str)
    )
    assert {name for name in feed if feed[name] != both[name]} == {"shop-planner"}
    of_feed = {"shop-planner", "shop-worker-feed", "shop-trigger-feed"}
    assert {name for name in both if model[name] != both[name]} == of_feed
    assert not {name for name in feed if name != "shop-topics" and larger[name] == feed[name]}
    assert {*shared} == {*feed}, "a scenario that shares workers has no processes"
    for one, other in ((feed, shared), (shared, tighter)):
        assert {name for name in one if one[name] != other[name]} == of_feed
    assert acts["shop-worker-feed"] != both_act["shop-worker-feed"], "it must know where it may be moved to"


#: Values, and what the error says of them.
REFUSED: list[tuple[Object, str]] = [
    ({}, "fleet.kafka.bootstrap is not set"),
    ({**PLAIN, "sekrets": {}}, "'sekrets' not allowed"),
    ({**PLAIN, "workers": {"settings": {"worker": {"device": "cpu"}}}}, "'worker'"),
    ({**PLAIN, "workers": {"settings": {"kafka.sasl_password": "x"}}}, "'kafka.sasl_password'"),
    ({**PLAIN, "secrets": {"kafka.pasword": {"secret": "a", "key": "b"}}}, "'kafka.pasword'"),
    ({**PLAIN, "secrets": {"handover.secret": {"secret": "a"}}}, "missing property 'key'"),
    ({**PLAIN, "groups": {"feed": {}}}, "groups.feed: fleet.scenario has no feed"),
    (
        {
            "fleet": {**PLAIN["fleet"], "scenario": {"feed": {}, "ads": {"served_by": "feed"}}},
            "groups": {"ads": {}},
        },
        "groups.ads: fleet.scenario has no ads with workers of its own",
    ),
    ({**FEED, "groups": {"reserve": {}}}, "groups.reserve: these workers stand by until a planner moves them"),
    ({**PLAIN, "gateway": {"enabled": True}}, "secrets: {gateway.tokens:"),
    ({**PLAIN, "workers": {"resources": {"limits": {"memory": "4Gi"}}}}, "is less than the worker takes, 4416Mi"),
    ({**PLAIN, "workers": {"settings": {"worker.hbm_bytes": "1 GB"}}}, 'worker.hbm_bytes = "1 GB" is no size'),
    ({"fleet": {**PLAIN["fleet"], "scenario": {"Feed": {}}}}, "'Feed'"),
    ({"fleet": {**PLAIN["fleet"], "scenario": {"feed": {"min_workers": 0}}}}, "/min_workers"),
    (
        {"fleet": {**PLAIN["fleet"], "scenario": {"feed": {"min_workers": 3}}}, "groups": {"feed": {"replicas": 2}}},
        "groups.feed.replicas is 2, below min_workers = 3",
    ),
    ({**FEED, "groups": {"feed": {"replicas": 0}}}, "groups.feed.replicas is 0, below min_workers = 1"),
    ({**FEED, "keda": {"enabled": True}}, "set keda.prometheus.serverAddress"),
    ({**PLAIN, "keda": {"enabled": True}}, "fleet.scenario has none"),
    (
        {
            **FEED,
            "keda": {"enabled": True, "prometheus": {"serverAddress": "http://prometheus:9090"}},
            "planner": {"mode": "act"},
        },
        "set planner.mode to advise",
    ),
]


def test_what_cannot_serve_is_refused_with_the_reason() -> None:
    errors = render(*(values for values, _ in REFUSED))
    assert [(said, error) for (_, said), error in zip(REFUSED, errors, strict=True) if said not in str(error)] == []
    assert all(isinstance(error, str) for error in errors)


def test_a_group_that_a_rollout_left_has_no_workers_and_no_other_has_none() -> None:
    left, none = render({**PLAIN, "groups": {"default": {"replicas": 0}, "next": {}}}, FEED)
    assert not isinstance(left, str)
    assert not isinstance(none, str)
    workers = {name: each["spec"]["replicas"] for name, each in of_kind(left, "StatefulSet").items()}
    assert workers == {"shop-worker-default": 0, "shop-worker-next": 1}
    assert [each["spec"]["replicas"] for each in of_kind(none, "StatefulSet").values()] == [1]


def test_a_reserve_has_workers_that_stand_by_for_all_scenarios_and_no_trigger() -> None:
    act = {"planner": {"mode": "act"}, "groups": {"reserve": {"replicas": 3}}}
    (made, more) = render(FEED | act, {"fleet": {**PLAIN["fleet"], "scenario": {"feed": {}, "ads": {}}}} | act)
    assert not isinstance(made, str) and not isinstance(more, str)
    found, later = ({name: each for name, each in processes(one).items() if "reserve" in name} for one in (made, more))
    assert {*found} == {"shop-worker-reserve"}
    assert container(found["shop-worker-reserve"])["args"][-1] == "--reserve"
    assert of_kind(made, "StatefulSet")["shop-worker-reserve"]["spec"]["replicas"] == 3
    assert {name for name in of_kind(made, "PodDisruptionBudget") if "reserve" in name} == {"shop-worker-reserve"}
    assert found != later, "it must know where it may be moved to"


def test_the_schema_has_what_the_program_has() -> None:
    """A new key of a scenario, a new section or secret belongs into values.schema.json, too."""
    keys = {key.rpartition(".")[2] for key, field in section_fields("scenario", Scenario).items() if field.description}
    assert set(SCHEMA["$defs"]["scenario"]["properties"]) == keys
    secrets = sorted(key for key, field in FIELDS.items() if field.is_secret)
    assert SCHEMA["$defs"]["secrets"]["propertyNames"]["enum"] == secrets
    assert SCHEMA["$defs"]["settings"]["propertyNames"]["not"]["enum"] == secrets
    sections = {key.partition(".")[0] for key in FIELDS}
    assert set(SCHEMA["properties"]["fleet"]["properties"]) == sections | {"scenario"}
    assert (
        set(re.findall(r"\w+", SCHEMA["$defs"]["settings"]["propertyNames"]["pattern"].partition(")")[0])) == sections
    )


def test_every_setting_that_the_chart_names_is_one() -> None:
    texts = [path.read_text() for path in CHART.rglob("*") if path.suffix in {".tpl", ".yaml", ".txt"}]
    variables = {name for text in texts for name in re.findall(r"RELAYGR_[A-Z]+_[A-Z_]+", text)}
    assert variables and variables <= {field.env for field in FIELDS.values()}
    sections = "|".join({key.partition(".")[0] for key in FIELDS})
    keys = {key for text in texts for key in re.findall(rf'"((?:{sections})\.[a-z_]+)"', text)}
    assert keys and keys <= set(FIELDS)


def test_defaults_of_the_chart_are_the_programs() -> None:
    """Those that templates compute with, where values state none."""
    text = (CHART / "templates" / "_values.tpl").read_text() + (CHART / "templates" / "groups.yaml").read_text()
    stated = dict(re.findall(r'"key" "([\w.]+)" "default" "?([\w.]+)', text))
    stated |= dict(re.findall(r'"([\w]+\.[\w]+_bytes)" "(\w+)"', text))
    assert {"worker.drain_ms", "worker.hbm_bytes", "history.cache_bytes"} <= set(stated)
    for key, value in stated.items():
        given = load_settings(flags={key: value}, environ={}).settings
        section, name = key.split(".")
        assert getattr(getattr(given, section), name) == FIELDS[key].default


def test_the_charts_version_is_the_programs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == project["version"]


def test_the_guides_values_make_a_fleet() -> None:
    page = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text(encoding="utf-8")
    first, second = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    for made in render(first, first | second):
        assert not isinstance(made, str), made
        assert {"shop-worker-feed", "shop-planner"} <= set(processes(made))


def test_alert_rules_and_dashboards_are_those_of_the_testbed() -> None:
    boards = of_kind(rendered()["secured"], "ConfigMap")["shop-dashboards"]["data"]
    assert boards == {path.name: path.read_text() for path in ROOT.glob("docker/grafana/dashboards/*.json")}
    (rules,) = of_kind(rendered()["secured"], "PrometheusRule").values()
    assert rules["spec"] == yaml.safe_load((ROOT / "docker" / "prometheus" / "alerts.yml").read_text())
