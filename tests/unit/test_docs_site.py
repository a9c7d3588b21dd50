"""The site that `make docs` builds: strictly, from the code, without anything of the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import click
import pytest
from prometheus_client import CollectorRegistry

from relaygr_stream.bus.renewed import RenewalsCollector
from relaygr_stream.cli.main import main
from relaygr_stream.client.metrics import ClientMetrics
from relaygr_stream.gateway.metrics import Metrics as GatewayMetrics
from relaygr_stream.handover.desk import HandoverMetrics
from relaygr_stream.ops.planner.metrics import PlannerMetrics
from relaygr_stream.ops.rollout.run import RolloutMetrics
from relaygr_stream.settings import load as config
from relaygr_stream.settings.schema import Settings, Telemetry
from relaygr_stream.telemetry.otlp import SpanCounts
from relaygr_stream.telemetry.process import process
from relaygr_stream.trigger.metrics import TriggerMetrics
from relaygr_stream.worker.histories import HistoryMetrics
from relaygr_stream.worker.metrics import WorkerMetrics

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.stack  # builds the site


def build(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`mkdocs build --strict`, as `make docs` runs it."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *options]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "true"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(folder)
    assert built.returncode == 0, built.stderr
    return folder


def text(site: Path, page: str) -> str:
    """What a reader sees of a page."""
    return unescape(re.sub(r"<[^>]+>", "", (site / f"{page}.html").read_text(encoding="utf-8")))


def commands(command: click.Command, path: str) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), name)
            assert found is not None
            yield from commands(found, f"{path} {name}")
    else:
        yield path


def test_the_settings_page_has_every_setting(site: Path) -> None:
    page = text(site, "reference/settings")
    assert len(config.FIELDS) > 50
    assert [key for key in config.FIELDS if f"\n{key}\n" not in page] == []


async def test_the_metrics_page_has_every_metric_and_no_other(site: Path) -> None:
    async with process(Settings(telemetry=Telemetry(log_level="error")), "worker") as ctx:
        kinds = (
            WorkerMetrics,
            HistoryMetrics,
            HandoverMetrics,
            TriggerMetrics,
            ClientMetrics,
            GatewayMetrics,
            RolloutMetrics,
            PlannerMetrics,
            SpanCounts,
        )
        registries = [ctx.registry, *(CollectorRegistry() for _ in kinds)]
        for metrics, registry in zip(kinds, registries[1:], strict=True):
            metrics(registry)
        ctx.registry.register(RenewalsCollector())
        ours = {
            family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
            for registry in registries
            for family in registry.collect()
            if family.name.startswith("relaygr_")
        }
    assert set(re.findall(r"^(relaygr_\w+)$", text(site, "reference/metrics"), re.M)) == ours


def test_the_commands_page_has_the_help_of_every_command(site: Path) -> None:
    page = text(site, "reference/commands")
    assert [path for path in commands(main, "relaygr") if f"Usage: {path} [OPTIONS]" not in page] == []


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(r'<(?:script|img|iframe)[^>]+src="([^"]+)"|<link[^>]+href="([^"]+)"')
    loaded = [
        (page, "".join(each))
        for page in site.rglob("*.html")
        for each in loads.findall(page.read_text(encoding="utf-8"))
    ]
    assert loaded
    assert [(page, source) for page, source in loaded if "://" in source] == []


def test_a_broken_link_ends_the_build(tmp_path: Path) -> None:
    page = ROOT / "docs" / "index.md"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(page.read_text(encoding="utf-8"), encoding="utf-8")  # alone: links end
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[0]
    (tmp_path / "mkdocs.yml").write_text(settings.replace("docs/generate.py", str(ROOT / "docs/generate.py")))
    built = build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert built.returncode == 1
    assert "tutorial/index.md" in built.stderr


def test_every_link_is_a_file_so_that_the_site_opens_from_disk(site: Path) -> None:
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # its links start at the root of a server
            continue
        for link in re.findall(r'href="([^"#?:]+)[#?"]', page.read_text(encoding="utf-8")):
            assert (page.parent / unescape(link)).is_file(), f"{page.relative_to(site)}: {link}"
