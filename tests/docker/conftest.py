"""The compose testbed under a name and a port of its own, for the tests of this folder; removed whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from relaygr_stream.ops.brokers.distribution import free_ports

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docker" / "testbed.sh"
HINT = "`make test-docker` runs this; it needs a Docker engine with compose (docs/how-to/deploying.md)"

#: Without the proxy that the environment may name.
LOOPBACK = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Testbed:
    """What `make testbed` brings up, beside one that may already run here."""

    __test__ = False

    def __init__(self) -> None:
        self.project = f"relaygr-test-{os.getpid()}"
        kafka, gateway, self._prometheus = free_ports(3)
        self.bootstrap = f"127.0.0.1:{kafka}"
        self.gateway = f"http://127.0.0.1:{gateway}"
        self._environment = {
            **os.environ,
            "TESTBED_PROJECT": self.project,
            "TESTBED_KAFKA_PORT": str(kafka),
            "TESTBED_GATEWAY_PORT": str(gateway),
            "TESTBED_PROMETHEUS_PORT": str(self._prometheus),
        }
        self.shown = ""  # what `up` printed

    def up(self) -> None:
        self.shown = self._script("up")

    def down(self) -> None:
        self._script("down")

    def compose(self, *arguments: str) -> None:
        self._script("compose", *arguments)

    def query(self, expression: str) -> list[Any]:
        """What Prometheus has for an expression now; one that it cannot read is an error, one without values is []."""
        url = f"http://127.0.0.1:{self._prometheus}/api/v1/query?{urlencode({'query': expression})}"
        try:
            with contextlib.suppress(ConnectionError, TimeoutError), LOOPBACK.open(url, timeout=5) as response:
                result = json.load(response)["data"]["result"]
                assert isinstance(result, list)
                return result
        except urllib.error.HTTPError as error:
            if error.code != 503:  # of one that starts
                raise
        return []

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """What the gateway answers; an error of HTTP is an error here."""
        headers = {"content-type": "application/json", "authorization": "Bearer only-for-the-testbed"}
        request = urllib.request.Request(self.gateway + path, json.dumps(body).encode(), headers)
        with LOOPBACK.open(request, timeout=20) as response:
            return json.load(response)

    def container(self, service: str) -> str:
        """The id of a service's container, running or not."""
        (found,) = self.left("ps", "--all", "--filter", f"label=com.docker.compose.service={service}")
        return found

    def left(self, *command: str) -> list[str]:
        """Ids of this testbed's containers (`ps`), networks (`network ls`) or volumes (`volume ls`)."""
        return docker(*command, "--quiet", "--filter", f"label=com.docker.compose.project={self.project}").split()

    def _script(self, *arguments: str) -> str:
        done = subprocess.run([SCRIPT, *arguments], env=self._environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def docker(*arguments: str, stdin: str = "") -> str:
    """What `docker …` prints; a failure is an error."""
    return subprocess.run(["docker", *arguments], input=stdin, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="session")
def testbed() -> Iterator[Testbed]:
    if os.environ.get("RELAYGR_TEST_DOCKER") != "1":
        pytest.skip(HINT)
    if (
        shutil.which("docker") is None
        or subprocess.run([SCRIPT, "engine"], capture_output=True, check=False).returncode
    ):
        pytest.skip(HINT)
    bed = Testbed()
    try:
        bed.up()
        yield bed
    finally:
        bed.down()
