"""What docker/ says of the program: images, environment, commands, ports and metrics, checked against the program."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

import click
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.metrics import MetricWrapperBase

from relaygr_stream.cli.main import main
from relaygr_stream.client.metrics import ClientMetrics
from relaygr_stream.gateway.metrics import Metrics as GatewayMetrics
from relaygr_stream.ops.planner.metrics import PlannerMetrics
from relaygr_stream.settings.load import ENV_CONFIG, ENV_NOT_SETTINGS, FIELDS, load_settings
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.loopwatch import LoopWatch
from relaygr_stream.telemetry.otlp import SpanCounts
from relaygr_stream.telemetry.process import _describe
from relaygr_stream.telemetry.server import export_readiness
from relaygr_stream.trigger.metrics import TriggerMetrics
from relaygr_stream.worker.histories import HistoryMetrics
from relaygr_stream.worker.metrics import WorkerMetrics

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("locked", ROOT / "docker" / "locked.py")
assert spec is not None and spec.loader is not None
locked_py = importlib.util.module_from_spec(spec)
spec.loader.exec_module(locked_py)
DOCKER = ROOT / "docker"
SERVICES = yaml.load((DOCKER / "compose.yaml").read_text(), yaml.CSafeLoader)["services"]
#: Those that run what this repository builds.
OURS = {name: service for name, service in SERVICES.items() if service["image"].startswith("relaygr-stream:")}
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
PROMETHEUS = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(DOCKER.glob("grafana/dashboards/*.json"))}
PANELS = [panel for board in BOARDS.values() for panel in board["panels"]]
FILES = [path for path in sorted(DOCKER.rglob("*")) if path.is_file() and path.suffix != ".pyc"]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in FILES}
GROUPS = yaml.load((DOCKER / "prometheus" / "alerts.yml").read_text(), yaml.CSafeLoader)["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = [rule["expr"] for rule in RULES]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
#: A metric of ours, or what a rule records.
METRIC = r"\brelaygr[_:][\w:]+"


PORT = re.findall(r"RELAYGR_TELEMETRY_PORT=(\d+)", DOCKERFILE)[0]
COMMANDS = [service["command"] for service in OURS.values()]
COMMANDS += [json.loads(command) for command in re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)]


def test_one_image_name_everywhere() -> None:
    named = {
        match
        for name in ("docker/compose.yaml", "docker/testbed.sh", "docker/Dockerfile")
        for match in re.findall(r"relaygr-stream:[\w.-]+", TEXTS[name])
    }
    assert named == {"relaygr-stream:cpu"}
    assert [service["build"]["target"] for service in OURS.values() if "build" in service] == ["cpu"]


def test_the_dockerfile_has_every_target_that_is_named() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    of_services = {service["build"]["target"] for service in SERVICES.values() if "build" in service}
    guide = (ROOT / "docs" / "how-to" / "deploying.md").read_text(encoding="utf-8")
    of_guide = set(re.findall(r"--target (\w+)", guide))
    assert of_services and of_guide
    assert of_services | of_guide <= stages


def _lock(what: str) -> dict[str, tuple[str, list[str]]]:
    """Version and hashes by package."""
    text = (DOCKER / f"{what}.lock").read_text(encoding="utf-8")
    assert "://" not in text, "a lock file names no index"
    found = re.findall(r"^([\w.-]+)==(\S+)([^\n]*\n(?:    --hash=sha256:[0-9a-f]{64}[^\n]*\n)+)", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if line and line[0] not in " #"]
    assert len(lines) == len(found), "each package has hashes"
    return {_normal(name): (version, re.findall("sha256:([0-9a-f]+)", hashes)) for name, version, hashes in found}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("what", ["requirements", "setup", "build", "uv"])
def test_what_the_program_depends_on_is_locked_by_hash(what: str) -> None:
    locked = _lock(what)
    wanted = {_normal(re.split(r"[<>=!~;\[ ]", line)[0]) for line in locked_py.wanted(what)}
    assert wanted and wanted <= set(locked), f"make lock: {wanted - set(locked)} are not in docker/{what}.lock"
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    other = {name: pin for name, pin in pins.items() if locked.get(_normal(name), (pin,))[0] != pin}
    assert not other, f"make lock: constraints.txt has {other}"
    assert "torch" not in locked


def test_make_setup_installs_by_hash_all_but_torch() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    hashed, free = re.findall(r"pip install (.*)", makefile.partition("$(STAMP):")[2].partition("@touch")[0])
    assert "--require-hashes" in hashed and {"docker/setup.lock", "docker/build.lock"} <= set(hashed.split())
    assert "--no-build-isolation" in free and "--constraint constraints.txt" in free


def test_what_is_locked_installs_on_the_oldest_python_that_the_project_names() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(re.findall(r"--python-version (\S+)", makefile)) == {project["requires-python"].removeprefix(">=")}


@pytest.mark.parametrize(
    ("backend", "index", "config", "uv", "installs"),
    [
        ("cpu", "", "", 0, ["uv pip install --python ./python --torch-backend=cpu --requirement torch.txt"]),
        ("pip", "", "", 0, ["pip install --requirement torch.txt"]),
        ("cpu", "mirror", "", 0, ["pip install --index-url mirror --requirement torch.txt"]),
        ("auto", "", "global.extra-index-url='mirror'", 0, ["pip install --requirement torch.txt"]),
        ("auto", "", "global.timeout='9'", 1, ["uv pip install --python", "pip install --requirement torch.txt"]),
    ],
    ids=["of the backend", "as pip finds it", "named index", "pip has an index", "uv reaches none"],
)
def test_where_torch_comes_from(
    tmp_path: Path, backend: str, index: str, config: str, uv: int, installs: list[str]
) -> None:
    """A python that notes what it is asked to install; torch itself is of a gigabyte."""
    python = tmp_path / "python"
    python.write_text(
        f'''#!/bin/sh
[ "$3" = config ] && echo "{config}" && exit
shift; echo "$@" >> steps; [ "$1" = pip ] || exit {uv}'''
    )
    python.chmod(0o755)
    subprocess.run(
        ["sh", DOCKER / "torch.sh", "./python", backend, "torch.txt"],
        cwd=tmp_path,
        env={**os.environ, "TORCH_INDEX_URL": index},
        check=True,
    )
    steps = (tmp_path / "steps").read_text().splitlines()
    assert len(steps) == len(installs) and all(map(str.startswith, steps, installs)), steps


def test_each_target_has_the_torch_of_its_device() -> None:
    of_targets = {}
    for target in ("cpu", "cuda", "npu"):
        stage = DOCKERFILE.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
        (of_targets[target],) = re.findall(r"torch\.sh \S+ (\w+) ", stage)
    assert of_targets == {"cpu": "cpu", "cuda": "pip", "npu": "cpu"}
    assert "torch.sh $(BIN)/python auto" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_redis_checks_host_names() -> None:
    """Before version 6 its client checked none, unless told to."""
    wanted = next(line for line in locked_py.wanted("requirements") if line.startswith("redis"))
    assert wanted == "redis>=6"


def test_what_is_copied_into_images_reaches_the_builder() -> None:
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    copied = {name for line in re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()}
    assert copied
    assert not [name for name in copied if f"!{name.removeprefix('./')}" not in allowed]


def test_nothing_but_torch_is_installed_without_hashes() -> None:
    steps = re.findall(r"pip install (.*)", DOCKERFILE)
    free = [step for step in steps if "--require-hashes" not in step and "--no-deps" not in step]
    assert free and all(re.search(r"torch\.txt|\[npu\]", step) for step in free), free


def test_every_image_has_a_version() -> None:
    images = [service["image"] for service in SERVICES.values()]
    images += (bases := re.findall(r"^ARG \w+_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE))
    assert bases
    assert [image for image in images if ":" not in image or image.endswith(":latest")] == []


@pytest.mark.parametrize("name", TEXTS)
def test_every_variable_named_is_one_the_program_reads(name: str) -> None:
    known = {field.env for field in FIELDS.values()} | {ENV_CONFIG}
    named = set(re.findall(r"\bRELAYGR_[A-Z0-9_]+", TEXTS[name]))
    unknown = {variable for variable in named - known if not variable.startswith(ENV_NOT_SETTINGS)}
    assert unknown == set()


def test_every_value_in_the_environment_is_accepted() -> None:
    pairs = [pair for service in OURS.values() for pair in service["environment"].items()]
    pairs += (of_images := re.findall(r"^(?:ENV)? +(RELAYGR_\w+)=(\S+)", DOCKERFILE, re.MULTILINE))
    assert of_images
    for name, value in pairs:
        load_settings(environ={name: value})


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_is_one_the_program_has(command: list[str]) -> None:
    found: click.Command = main
    arguments = command
    context = click.Context(main, info_name="relaygr")
    while isinstance(found, click.Group):
        if found.invoke_without_command and arguments[:1] != [] and arguments[0].startswith("-"):
            break  # a group that is a command itself, with its own options
        name, sub, arguments = found.resolve_command(context, arguments)
        assert sub is not None, f"no command {name!r}"
        context, found = click.Context(sub, parent=context, info_name=name), sub
    found.make_context(context.info_name, arguments)  # raises on an unknown option or a missing argument


def test_containers_stop_after_the_processes_have_drained() -> None:
    settings = Settings()
    drains = dict.fromkeys(("worker-1", "worker-2"), settings.worker.drain_ms) | {"gateway": settings.gateway.drain_ms}
    for name, drain_ms in drains.items():
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) * 1e3 > drain_ms


def test_a_worker_service_that_is_scaled_has_workers_of_several_names() -> None:
    assert not [name for name, service in OURS.items() if "RELAYGR_WORKER_NAME" in service["environment"]]
    assert not [name for name, service in OURS.items() if "hostname" in service]  # the default name has the host's


def test_every_service_has_a_memory_limit() -> None:
    assert [name for name, service in SERVICES.items() if "mem_limit" not in service] == []


def test_every_process_of_the_testbed_is_of_a_fleet_that_the_dashboard_can_choose() -> None:
    jobs = [each for job in PROMETHEUS["scrape_configs"] for each in job["static_configs"]]
    assert [job["labels"] for job in jobs] == [{"fleet": "testbed"}] * len(jobs)
    variables = {name: [each["name"] for each in board["templating"]["list"]] for name, board in BOARDS.items()}
    assert variables == {"relay": ["fleet"], "scenarios": ["fleet", "scenario"]}
    chosen = [len(re.findall(METRIC + r'\{fleet=~"\$fleet"', each)) for each in EXPRESSIONS]
    assert chosen == [len(re.findall(METRIC, each)) for each in EXPRESSIONS]


def test_every_panel_of_the_scenarios_is_of_the_chosen_ones() -> None:
    expressions = [target["expr"] for panel in BOARDS["scenarios"]["panels"] for target in panel["targets"]]
    assert expressions and [each for each in expressions if 'scenario=~"$scenario"' not in each] == []


def test_ports_are_published_on_the_loopback_address_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_prometheus_scrapes_every_process_at_its_port() -> None:
    assert set(re.findall(r"RELAYGR_TELEMETRY_PORT=(\d+)", DOCKERFILE)) == {PORT}
    assert set(re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, re.MULTILINE)) == {PORT}
    jobs = [each for job in PROMETHEUS["scrape_configs"] for each in job["static_configs"]]
    targets = {target for job in jobs for target in job["targets"]}
    assert targets == {
        f"{service}:{PORT}" for service in SERVICES if service.startswith(("client", "gateway", "trigger", "worker"))
    }


def test_grafana_reads_the_prometheus_of_the_testbed() -> None:
    (source,) = yaml.safe_load(TEXTS["docker/grafana/provisioning/datasources/prometheus.yaml"])["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert SERVICES["prometheus"]["ports"][0].endswith(":9090")
    assert {panel["datasource"]["uid"] for panel in PANELS} == {source["uid"]}
    (provider,) = yaml.safe_load(TEXTS["docker/grafana/provisioning/dashboards/relay.yaml"])["providers"]
    folder, grafana = provider["options"]["path"], SERVICES["grafana"]
    assert f"./grafana/dashboards:{folder}:ro" in grafana["volumes"]
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{folder}/relay.json"
    assert (DOCKER / "grafana" / "dashboards" / "relay.json").is_file()


def _samples() -> dict[str, set[str]]:
    """Each sample that the processes export, and its labels."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    registry = CollectorRegistry()
    samples: dict[str, set[str]] = {}
    LoopWatch(registry, stall_s=1.0)
    _describe(registry, "worker", "feed")
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    export_readiness(registry, lambda: None)
    serving = (
        WorkerMetrics(registry, scenario="feed"),
        TriggerMetrics(registry),
        HistoryMetrics(registry),
        SpanCounts(registry),
    )
    parts = (*serving, ClientMetrics(registry), GatewayMetrics(registry), PlannerMetrics(registry))
    for metrics in parts:
        for metric in vars(metrics).values():
            if isinstance(metric, MetricWrapperBase):
                (family,) = metric.describe()
                samples |= {family.name + suffix: set(metric._labelnames) for suffix in suffixes[family.type]}
    samples["relaygr_parts_made_anew_total"] = {"part"}
    samples |= {rule["record"]: {"fleet", "scenario"} for rule in RULES if "record" in rule}
    for family in registry.collect():  # those that are collected from plain numbers
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    return samples


@pytest.mark.parametrize("expression", EXPRESSIONS + ALERTS)
def test_every_metric_and_label_of_dashboard_and_alerts_is_exported(expression: str) -> None:
    samples = _samples()
    named = set(re.findall(METRIC, expression))
    assert named and named <= set(samples)
    labels = set(re.findall(r"(\w+)!?=~?\"", expression))
    labels |= set(chain.from_iterable(re.split(r", *", group) for group in re.findall(r"\bby \(([^)]*)\)", expression)))
    exported = set().union(*(samples[name] for name in named)) | {"fleet", "instance", "job", "le"}
    assert labels <= exported


def test_a_worker_without_any_hit_exports_0_hits_and_not_nothing() -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry)
    named = set(chain.from_iterable(found.split("|") for found in re.findall(r'outcome=~?"([^"]+)"', str(ALERTS))))
    assert {"hbm", "dram", "joined"} <= named
    for outcome in named:
        assert registry.get_sample_value("relaygr_answers_total", {"status": "ok", "outcome": outcome}) == 0.0


def test_rates_of_forwards_miss_no_first_one() -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry)
    queries = (ROOT / "docs" / "how-to" / "deploying.md").read_text(encoding="utf-8")
    named = set(re.findall(r'relaygr_forwards_total\{result="([^"]+)"', queries))
    assert {"sent", "late", "delegate", "delegate_gone"} <= named
    for result in named:
        assert registry.get_sample_value("relaygr_forwards_total", {"result": result}) == 0.0


@pytest.mark.parametrize("compose", [("docker", "compose"), ("docker-compose",)], ids=" ".join)
def test_compose_accepts_the_file(compose: tuple[str, ...]) -> None:
    if (
        shutil.which(compose[0]) is None
        or subprocess.run([*compose, "version"], capture_output=True, check=False).returncode
    ):
        pytest.skip(f"no `{' '.join(compose)}` here: install the package that brings it")
    file = str(DOCKER / "compose.yaml")
    done = subprocess.run([*compose, "-f", file, "config", "--quiet"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("linter", "files"),
    [("hadolint", ["Dockerfile"]), ("shellcheck", ["testbed.sh", "ready.sh", "npu.sh", "torch.sh"])],
    ids=["hadolint", "shellcheck"],
)
def test_the_linter_finds_nothing(linter: str, files: list[str]) -> None:
    program = shutil.which(linter, path=f"{ROOT / '.venv' / 'bin'}") or shutil.which(linter)
    if program is None:
        pytest.skip(f"no {linter} here: pip install {linter}-{'bin' if linter == 'hadolint' else 'py'}")
    paths = [str(DOCKER / file) for file in files]
    done = subprocess.run([program, *paths], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
