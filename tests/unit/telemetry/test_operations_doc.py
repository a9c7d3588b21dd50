"""docs/operations.md tells what the program does: its tables are compared with the program."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from relaygr_stream.bus.renewed import RenewalsCollector
from relaygr_stream.cli.config_table import render_settings_markdown, render_settings_table
from relaygr_stream.client.metrics import ClientMetrics
from relaygr_stream.handover.desk import HandoverMetrics
from relaygr_stream.settings import load as config
from relaygr_stream.settings.schema import Settings, Telemetry
from relaygr_stream.telemetry.process import process
from relaygr_stream.trigger.metrics import TriggerMetrics
from relaygr_stream.worker.metrics import WorkerMetrics

DOC = Path(__file__).parents[3] / "docs" / "operations.md"


def test_the_settings_table_is_the_generated_one() -> None:
    table = DOC.read_text(encoding="utf-8").split("## Settings\n", 1)[1]
    table = table[table.index("| key |") :].strip()
    assert table == render_settings_markdown(), "replace the table by what `relaygr config show --markdown` prints"


async def test_the_metrics_tables_name_every_metric_and_no_other() -> None:
    async with process(Settings(telemetry=Telemetry(log_level="error")), "worker") as ctx:
        kinds = (WorkerMetrics, HandoverMetrics, TriggerMetrics, ClientMetrics)
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
    rows = re.findall(r"^\|((?: `relaygr_\w+`,?)+) \| (?:counter|gauge|histogram) \|", DOC.read_text("utf-8"), re.M)
    assert {name for row in rows for name in re.findall(r"\w+", row)} == ours


def test_the_table_of_a_process_tells_values_sources_and_no_secret() -> None:
    loaded = config.load_settings(
        ["cpu"],
        {"worker.hbm_bytes": "512MiB"},
        {"RELAYGR_WORKER_BATCH": "3", "RELAYGR_TELEMETRY_HASH_KEY": "pepper"},
    )
    text = render_settings_table(loaded)
    rows = {line.split()[0]: line for line in text.splitlines()}
    assert rows["key"].split() == ["key", "value", "source", "meaning"]
    assert set(rows) == {"key", *config.FIELDS}
    assert "512MiB" in rows["worker.hbm_bytes"]
    assert "flag" in rows["worker.hbm_bytes"]
    assert "environment RELAYGR_WORKER_BATCH" in rows["worker.batch"]
    assert "cpu.toml" in rows["worker.device"]
    assert "pepper" not in text
    assert len({line.index(config.FIELDS[key].description) for key, line in rows.items() if key != "key"}) == 1
