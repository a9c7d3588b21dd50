"""The tables of settings that a process prints."""

from __future__ import annotations

from relaygr_stream.cli.config_table import render_settings_table
from relaygr_stream.settings import load as config
from relaygr_stream.telemetry.printable import render_plain


def test_the_table_of_a_process_tells_values_sources_and_no_secret() -> None:
    loaded = config.load_settings(
        ["cpu"],
        {"worker.hbm_bytes": "512MiB"},
        {"RELAYGR_WORKER_THREADS": "3", "RELAYGR_TELEMETRY_HASH_KEY": "pepper"},
    )
    text = render_plain(render_settings_table(loaded))
    rows = {line.split()[0]: line for line in text.splitlines()}
    assert rows["key"].split() == ["key", "value", "source", "meaning"]
    assert set(rows) == {"key", *config.FIELDS}
    assert "512MiB" in rows["worker.hbm_bytes"]
    assert "flag" in rows["worker.hbm_bytes"]
    assert "environment RELAYGR_WORKER_THREADS" in rows["worker.threads"]
    assert "cpu.toml" in rows["worker.device"]
    assert "pepper" not in text
    assert len({line.index(config.FIELDS[key].description) for key, line in rows.items() if key != "key"}) == 1
