"""The Helm chart, rendered by Helm: its objects are as Kubernetes has them, and its processes read their settings."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client import CollectorRegistry

from relaygr_stream.cli.main import main
from relaygr_stream.ops.planner.metrics import PlannerMetrics
from relaygr_stream.settings.load import FIELDS, Config, load_settings
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.settings.section import section_fields
from tests import needs
from tests.chart import CHART, ROOT, Object, render

EXAMPLES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(CHART.parent.glob("examples/*.yaml"))}
ABOUT = yaml.safe_load((CHART / "Chart.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
PLAIN: Object = {"fleet": {"kafka": {"bootstrap": "kafka:9092"}}}
FEED: Object = {"fleet": {**PLAIN["fleet"], "scenario": {"feed": {}}}}
OPERATORS = ("keda.sh", "monitoring.coreos.com")

each_example = pytest.mark.parametrize("example", EXAMPLES)


@cache
def rendered() -> dict[str, list[Object]]:
    made = dict(zip(EXAMPLES, render(*EXAMPLES.values()), strict=True))
    assert not [error for error in made.values() if isinstance(error, str)]
    return made  # type: ignore[return-value]


def of_kind(objects: list[Object], *kinds: str) -> dict[str, Object]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] in kinds}


def processes(objects: list[Object]) -> dict[str, Object]:
    """The templates of pods, by the name of what makes them."""
    found = of_kind(objects, "StatefulSet", "Deployment", "Job")
    return {name: each["spec"]["template"] for name, each in found.items()}


def container(template: Object) -> Object:
    (found,) = template["spec"]["containers"]
    assert isinstance(found, dict)
    return found


@each_example
def test_every_object_is_as_kubernetes_has_it(example: str) -> None:
    """The newest that the package knows; `secured`, with most kinds of objects, the oldest that the chart names."""
    validating = needs.module("kubernetes_validate", "kubernetes-validate")
    oldest = re.findall(r"\d+\.\d+", ABOUT["kubeVersion"])[0]
    objects = [each for each in rendered()[example] if not each["apiVersion"].startswith(OPERATORS)]
    assert len(objects) > 10
    for each in objects:
        validating.validate(each, oldest if example == "secured" else validating.latest_version(), strict=True)


@pytest.mark.stack  # the types take 8 s of a core to import
def test_every_object_of_an_operator_is_as_its_types_have_it() -> None:
    """A type drops the keys that it does not have, so nothing may be missing afterwards."""
    needs.module("cloudcoil", "cloudcoil-models-keda cloudcoil-models-prometheus-operator")
    from cloudcoil.models.keda.v1alpha1 import ScaledObject
    from cloudcoil.models.prometheus_operator.v1 import PrometheusRule, ServiceMonitor

    types = {each.__name__: each for each in (PrometheusRule, ScaledObject, ServiceMonitor)}
    objects = [each for made in rendered().values() for each in made if each["apiVersion"].startswith(OPERATORS)]
    assert {each["kind"] for each in objects} == set(types)
    for each in objects:
        read = types[each["kind"]].model_validate(each)
        assert read.model_dump(mode="json", by_alias=True, exclude_unset=True) == each


def effective(template: Object, objects: list[Object], folder: Path) -> Config:
    """What the settings' own loader makes of a process's files, variables and arguments; secrets are their names."""
    held = container(template)
    volumes = {each["name"]: each for each in template["spec"]["volumes"]}
    for mount in held["volumeMounts"]:
        volume, at = volumes[mount["name"]], folder / mount["mountPath"].lstrip("/")
        at.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            for name, text in of_kind(objects, "ConfigMap")[volume["configMap"]["name"]]["data"].items():
                (at / name).write_text(text, encoding="utf-8")
        for source in volume.get("projected", {}).get("sources", []):
            for item in source["secret"]["items"]:
                (at / item["path"]).write_text(f"t:{source['secret']['name']}/{item['key']}-16-characters")
                (at / item["path"]).chmod(0o600)
    environ = dict(re.findall(r"(RELAYGR_\w+)=(\S+)", DOCKERFILE.partition(" AS cpu\n")[0]))
    for each in held["env"]:
        value = each.get("value") or {"metadata.name": "w-0", "status.podIP": "10.0.0.1"}[_path(each)]
        environ[each["name"]] = f"{folder}{value}" if each["name"].endswith("_FILE") else value
    parameters = parsed(held["args"])
    assert not parameters["assignments"] and parameters["bootstrap"] is None
    config = load_settings([folder / name.lstrip("/") for name in parameters["files"]], environ=environ)
    scenario = parameters.get("scenario")
    return config if scenario is None else Config(config.settings.serving(scenario), config.values)


def _path(variable: Object) -> str:
    return str(variable["valueFrom"]["fieldRef"]["fieldPath"])


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The options of a command line of `relaygr`. Raises what click does on an unknown one."""
    found: click.Command = main
    context = click.Context(main, info_name="relaygr")
    while isinstance(found, click.Group):
        _, sub, arguments = found.resolve_command(context, arguments)
        assert sub is not None
        context, found = click.Context(sub, parent=context), sub
    return found.make_context("relaygr", list(arguments)).params


@each_example
def test_each_process_reads_its_settings(example: str, tmp_path: Path) -> None:
    objects, values = rendered()[example], EXAMPLES[example]
    scenarios = values["fleet"].get("scenario", {})
    assert set(scenarios) <= {container(each)["args"][-1] for each in processes(objects).values()}
    for name, template in processes(objects).items():
        config = effective(template, objects, tmp_path / name)
        settings = config.settings
        assert {each.name for each in settings.scenarios} == set(scenarios)
        assert settings.kafka.bootstrap == values["fleet"]["kafka"]["bootstrap"]
        assert settings.telemetry.host == "0.0.0.0"
        for section, keys in values["fleet"].items():
            if section != "scenario":
                assert {key for key in keys if f"{section}.{key}" not in FIELDS} == set()
        group = template["metadata"]["labels"].get("relaygr/group", "")
        prefix = values["fleet"]["kafka"].get("prefix", "relaygr.")
        assert settings.kafka.prefix == prefix + (f"{group}." if group not in {"", "default"} else "")
        if group in scenarios:
            assert settings.relay.slo_ms == scenarios[group].get("slo_ms", 50)
            assert {settings.model.checkpoint, settings.model.factory} == {scenarios[group].get("model", ""), ""}


@each_example
def test_a_workers_memory_holds_its_tiers(example: str, tmp_path: Path) -> None:
    objects = rendered()[example]
    overhead = EXAMPLES[example].get("workers", {}).get("overhead", "1GiB")
    for name, template in processes(objects).items():
        if "worker" not in name:
            continue
        config = effective(template, objects, tmp_path / name)
        worker = config.settings.worker
        beside_a_device = worker.device != "cpu"
        dram = 1 << (worker.dram_bytes - 1).bit_length() if beside_a_device else worker.dram_bytes
        hbm = 0 if beside_a_device else worker.hbm_bytes
        kept = worker.max_waiting_bytes + config.settings.history.cache_bytes
        needed = hbm + dram + kept + (int(overhead.removesuffix("GiB")) << 30)
        resources = container(template)["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"] == f"{-(-needed >> 20)}Mi"
        assert float(resources["requests"]["cpu"]) == worker.threads + 1


@each_example
def test_a_pod_lives_as_long_as_its_process_drains_and_has_no_more_rights(example: str, tmp_path: Path) -> None:
    uid = int(re.findall(r"--uid (\d+)", DOCKERFILE)[0])
    for name, template in processes(rendered()[example]).items():
        settings = effective(template, rendered()[example], tmp_path / name).settings
        pod, held = template["spec"], container(template)
        drain_ms = settings.worker.drain_ms if "worker" in name else settings.gateway.drain_ms
        assert pod["terminationGracePeriodSeconds"] * 1e3 >= drain_ms + 5_000
        assert pod["securityContext"]["runAsUser"] == uid and pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod["automountServiceAccountToken"] and not pod["enableServiceLinks"]
        assert held["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "privileged": False,
            "capabilities": {"drop": ["ALL"]},
        }
        if template["metadata"]["labels"]["app.kubernetes.io/component"] == "topics":
            continue
        ports = {each["name"]: each["containerPort"] for each in held["ports"]}
        assert ports["telemetry"] == settings.telemetry.port
        assert {held[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness")} == {"/healthz"}
        assert held["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "telemetry"}


@each_example
def test_what_selects_pods_and_what_is_named_is_there(example: str) -> None:
    objects = rendered()[example]
    pods = [template["metadata"]["labels"] for template in processes(objects).values()]
    for name, selector in selectors(objects):
        assert [labels for labels in pods if selector.items() <= labels.items()], f"{name} selects no pod"
    for each in of_kind(objects, "StatefulSet").values():
        assert each["spec"]["serviceName"] in of_kind(objects, "Service")
    claims = {each["kind"] + "/" + each["metadata"]["name"] for each in objects}
    assert len(claims) == len(objects), "each name once"


def selectors(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    for each in objects:
        spec = each.get("spec", {})
        for part in [spec, *spec.get("ingress", []), *spec.get("egress", [])]:
            found = [part.get("selector"), part.get("podSelector")]
            found += [peer.get("podSelector") for side in ("from", "to") for peer in part.get(side) or []]
            for selector in found:
                if selector and each["kind"] != "ServiceMonitor":
                    yield each["metadata"]["name"], selector.get("matchLabels", selector)


def test_each_role_has_the_secrets_that_it_uses_and_no_other() -> None:
    of_roles = {
        name.removeprefix("shop-"): {
            item["path"]: f"{source['secret']['name']}/{item['key']}"
            for volume in template["spec"]["volumes"]
            for source in volume.get("projected", {}).get("sources", [])
            for item in source["secret"]["items"]
        }
        for name, template in processes(rendered()["secured"]).items()
    }
    assert of_roles["worker-feed"]["kafka.sasl_password"] == "relaygr-kafka/worker"
    assert of_roles["gateway"]["kafka.sasl_password"] == "relaygr-kafka/gateway"
    assert {
        name: sorted({*found} - {"kafka.sasl_password", "telemetry.hash_key"}) for name, found in of_roles.items()
    } == {
        "worker-feed": ["handover.secret", "relay.answer_secret"],
        "trigger-feed": ["handover.secret"],
        "planner": ["handover.secret"],
        "topics": ["handover.secret"],
        "gateway": ["gateway.tokens", "relay.answer_secret"],
    }


def test_with_the_fleets_secret_workers_reach_each_other(tmp_path: Path) -> None:
    objects = rendered()["secured"]
    handover = effective(processes(objects)["shop-worker-feed"], objects, tmp_path).settings.handover
    assert (handover.host, handover.port, handover.advertise) == ("0.0.0.0", 9470, "10.0.0.1")
    policy = of_kind(objects, "NetworkPolicy")["shop-workers"]["spec"]
    for rules in ("ingress", "egress"):
        assert [port["port"] for rule in policy[rules] for port in rule["ports"]] == [handover.port]


def test_network_policies_let_out_to_the_brokers_and_the_store() -> None:
    def ports(example: str) -> list[list[int]]:
        out = of_kind(rendered()[example], "NetworkPolicy")["shop-processes"]["spec"]["egress"]
        return [[port["port"] for port in rule["ports"]] for rule in out]

    assert ports("three") == [[53, 53], [9092, 6380]]
    assert ports("scaled") == [[53, 53], [9092, 6379]]


def test_keda_follows_the_planner_and_nothing_else_sets_the_number_of_workers() -> None:
    objects = rendered()["scaled"]
    registry = CollectorRegistry()
    PlannerMetrics(registry)
    gauges = {family.name: family for family in registry.collect()}
    sets = of_kind(objects, "StatefulSet")
    assert not [name for name, each in sets.items() if "replicas" in each["spec"]]
    scaled = of_kind(objects, "ScaledObject")
    bounds = {name: (each["spec"]["minReplicaCount"], each["spec"]["maxReplicaCount"]) for name, each in scaled.items()}
    assert bounds == {"shop-worker-feed": (2, 64), "shop-worker-search": (1, 8)}
    for name, each in scaled.items():
        spec = each["spec"]
        assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name}
        (trigger,) = spec["triggers"]
        of = name.removeprefix("shop-worker-")
        assert trigger["metadata"]["query"] == f'max(relaygr_workers_wanted{{fleet="shop",scenario="{of}"}})'
        assert trigger["metadata"]["query"].split("(")[1].split("{")[0] in gauges
        assert trigger["metadata"]["ignoreNullValues"] == "false"
        down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]["policies"]
        assert [(policy["type"], policy["value"]) for policy in down] == [("Pods", 1)]
    assert parsed(container(processes(objects)["shop-planner"])["args"])["mode"] == "advise"
    (monitor,) = of_kind(objects, "ServiceMonitor").values()
    assert {"targetLabel": "fleet", "replacement": "shop"} in monitor["spec"]["endpoints"][0]["relabelings"]


def test_a_new_scenario_restarts_no_worker_and_a_new_model_those_that_serve_it() -> None:
    fleet = FEED["fleet"]
    act = {"planner": {"mode": "act"}}
    feed, both, model, larger, acts, both_act = (
        {name: each["metadata"]["annotations"]["relaygr/settings"] for name, each in processes(made).items()}
        for made in render(
            FEED,
            {"fleet": {**fleet, "scenario": {"feed": {"priority": 2}, "ads": {}}}},
            {"fleet": {**fleet, "scenario": {"feed": {"priority": 2, "model": "demo"}, "ads": {}}}},
            {"fleet": {**fleet, "relay": {"max_candidates": 512}}},
            FEED | act,
            {"fleet": {**fleet, "scenario": {"feed": {}, "ads": {}}}} | act,
        )
        if not isinstance(made, str)
    )
    assert {name for name in feed if feed[name] != both[name]} == {"shop-planner"}
    of_feed = {"shop-planner", "shop-worker-feed", "shop-trigger-feed"}
    assert {name for name in both if model[name] != both[name]} == of_feed
    assert not {name for name in feed if name != "shop-topics" and larger[name] == feed[name]}
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
    ({**PLAIN, "gateway": {"enabled": True}}, "secrets: {gateway.tokens:"),
    ({**PLAIN, "workers": {"resources": {"limits": {"memory": "4Gi"}}}}, "is less than the worker takes, 4416Mi"),
    ({**PLAIN, "workers": {"settings": {"worker.hbm_bytes": "1 GB"}}}, 'worker.hbm_bytes = "1 GB" is no size'),
    ({"fleet": {**PLAIN["fleet"], "scenario": {"Feed": {}}}}, "'Feed'"),
    ({"fleet": {**PLAIN["fleet"], "scenario": {"feed": {"min_workers": 0}}}}, "/min_workers"),
    (
        {"fleet": {**PLAIN["fleet"], "scenario": {"feed": {"min_workers": 3}}}, "groups": {"feed": {"replicas": 2}}},
        "groups.feed.replicas is 2, below min_workers = 3",
    ),
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


def test_defaults_of_the_chart_are_the_programs(tmp_path: Path) -> None:
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
    assert ABOUT["version"] == ABOUT["appVersion"] == project["version"]


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
