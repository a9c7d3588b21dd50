"""Renders the Helm chart by Helm's own library, in a process of its own: Go brings threads and signal handlers."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from tests import needs

ROOT: Final = Path(__file__).parents[1]
CHART: Final = ROOT / "deploy" / "helm" / "relaygr"
EXAMPLES: Final[dict[str, Any]] = {
    path.stem: yaml.load(path.read_text(), yaml.CSafeLoader) for path in sorted(CHART.parent.glob("examples/*.yaml"))
}
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


@cache
def rendered() -> dict[str, list[Object]]:
    """What each example makes."""
    made = dict(zip(EXAMPLES, render(*EXAMPLES.values()), strict=True))
    assert not [error for error in made.values() if isinstance(error, str)]
    return made  # type: ignore[return-value]


def of_kind(objects: list[Object], *kinds: str) -> dict[str, Object]:
    """By their names."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] in kinds}


def processes(objects: list[Object]) -> dict[str, Object]:
    """The templates of pods, by the name of what makes them."""
    found = of_kind(objects, "StatefulSet", "Deployment", "Job")
    return {name: each["spec"]["template"] for name, each in found.items()}


def container(template: Object) -> Object:
    """Of a pod's template: the only one."""
    (found,) = template["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def _objects(files: dict[str, str]) -> list[Object]:
    texts = (text for name, text in sorted(files.items()) if name.endswith(".yaml"))
    return [found for text in texts for found in yaml.load_all(text, yaml.CSafeLoader) if found]


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
