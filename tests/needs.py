"""What tests need of a machine beyond what `make setup` installs. A test whose need is not met is skipped; the end of
the run says in one line what is missing and how to get it, and with --no-missing the run fails."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable
from typing import Any, Final, NoReturn

import pytest

#: Debian's package of each program.
PACKAGES: Final = {
    "chromedriver": "chromium-driver",
    "chromium": "chromium",
    "curl": "curl",
    "java": "default-jre-headless",
    "node": "nodejs",
    "npm": "npm",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "redis-server": "redis-server",
}
KAFKA_HINT: Final = (
    "set KAFKA_HOME to an Apache Kafka 4 distribution (Java 17), or RELAYGR_TEST_BOOTSTRAP to a running cluster"
)
_MISSING: Final = "missing here: "
_INSTALL: Final = "apt-get install "


def programs(*names: str) -> None:
    """Skip the running test unless all these programs are on the PATH."""
    packages = sorted({PACKAGES[name] for name in names if shutil.which(name) is None})
    if packages:
        without(_INSTALL + " ".join(packages))


def module(name: str, package: str = "") -> Any:
    """A module of the extra `dev`; skips the running test where it is not installed. package: that has it, if its name
    is another."""
    if importlib.util.find_spec(name) is None:
        without(f"pip install {package or name}")
    return importlib.import_module(name)


def kafka_home() -> str:
    """Where Apache Kafka is unpacked; skips the running test where KAFKA_HOME does not say so."""
    return os.environ.get("KAFKA_HOME") or without(KAFKA_HINT)


def without(how: str) -> NoReturn:
    """Skip the running test. how: what to do to have it run."""
    pytest.skip(_MISSING + how)


def summary(reasons: Iterable[str]) -> str:
    """The line for these reasons of skipped tests; empty where nothing is missing."""
    hints = [reason.partition(_MISSING)[2] for reason in reasons if _MISSING in reason]
    packages = {name for hint in hints if hint.startswith(_INSTALL) for name in hint.removeprefix(_INSTALL).split()}
    others = sorted({hint for hint in hints if not hint.startswith(_INSTALL)})
    steps = ([_INSTALL + " ".join(sorted(packages))] if packages else []) + others
    return f"{len(hints)} tests skipped for what is missing here; to run them: {'; '.join(steps)}" if hints else ""
