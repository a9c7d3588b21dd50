"""Renders the Helm chart by Helm's own library, in a process of its own: Go brings threads and signal handlers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from tests import needs

ROOT: Final = Path(__file__).parents[1]
CHART: Final = ROOT / "deploy" / "helm" / "relaygr"
#: The release and its namespace.
RELEASE, NAMESPACE = "shop", "rank"

Object = dict[str, Any]


def render(*values: Object) -> list[list[Object] | str]:
    """The objects that each of these values makes; Helm's error where they make none."""
    needs.module("helm_python", "helm-python-sdk")
    command = [sys.executable, "-m", "tests.chart"]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [made if isinstance(made, str) else _objects(made) for made in json.loads(done.stdout)]


def _objects(files: dict[str, str]) -> list[Object]:
    texts = (text for name, text in sorted(files.items()) if name.endswith(".yaml"))
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


def _render_all() -> None:
    import helm_python

    def made(chart: helm_python.Chart, values: Object) -> dict[str, str] | str:
        try:
            chart.validate_schema(values)
            return chart.render(values, name=RELEASE, namespace=NAMESPACE)
        except helm_python.HelmError as error:
            return str(error)

    with helm_python.Chart.load(CHART) as chart:
        print(json.dumps([made(chart, values) for values in json.load(sys.stdin)]))


if __name__ == "__main__":
    _render_all()
