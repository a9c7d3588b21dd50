"""The Helm chart, rendered by Helm: its objects are as Kubernetes has them, and its processes read their settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client import CollectorRegistry

from relaygr_stream.cli.main import main
from relaygr_stream.ops.planner.metrics import PlannerMetrics
from relaygr_stream.settings.load import FIELDS, Config, load_settings
from relaygr_stream.settings.scenarios import RESERVE
from tests import needs
from tests.chart import CHART, EXAMPLES, ROOT, Object, container, of_kind, processes, rendered

OLDEST = re.findall(r"\d+\.\d+", yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"])[0]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
OPERATORS = ("keda.sh", "monitoring.coreos.com")

each_example = pytest.mark.parametrize("example", EXAMPLES)


@each_example
def test_every_object_is_as_kubernetes_has_it(example: str) -> None:
    """The newest that the package knows; `secured`, with most kinds of objects, the oldest that the chart names."""
    validating = needs.module("kubernetes_validate", "kubernetes-validate")
    objects = [each for each in rendered()[example] if not each["apiVersion"].startswith(OPERATORS)]
    assert len(objects) > 10
    for each in objects:
        validating.validate(each, OLDEST if example == "secured" else validating.latest_version(), strict=True)


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
    if parameters.get("reserve"):
        return Config(config.settings.standing_by(), config.values)
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
    served = {container(each)["args"][-1] for each in processes(objects).values()} - {"--reserve"}
    assert {name for name in scenarios if name in served} == {n for n, s in scenarios.items() if "served_by" not in s}
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
        assert settings.kafka.prefix == prefix + (f"{group}." if group not in {"", "default", RESERVE} else "")
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
