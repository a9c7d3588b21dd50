"""Brokers for the tests: an embedded one for each file, and one Apache Kafka for all where this machine has it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import math
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import pytest
import structlog
from aiokafka.conn import AIOKafkaConnection
from aiokafka.protocol.metadata import MetadataRequest
from hypothesis.internal.conjecture import providers

from relaygr_stream.bus import aiokafka_patches, embedded
from relaygr_stream.ops.brokers.distribution import DEFAULT_NODE
from relaygr_stream.ops.brokers.local import BrokerKind, LocalBroker, local_broker
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.telemetry import limiter
from tests import needs, properties
from tests.forks import SELDOM_MS, forking
from tests.longrun import LongRun
from tests.parallel import Parallel
from tests.waiting import WITHIN_S

# Before torch is imported, which the conftest.py of a folder may do. The tests' tensors are small, and threads for them
# only wait for each other: on a busy machine that took fifty times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing of what is imported and collected is garbage: to look for it took a tenth of the time of that.
gc.disable()

# The time of an example depends on the machine, so none is limited. A run judges a change by the same examples as the
# run before; `make test-long` and `make test-repeat` look for new ones (--hypothesis-profile=search).
search = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile(properties.WHOLE, search)
hypothesis.settings.register_profile(
    "same", search, derandomize=True, max_examples=properties.examples(search.max_examples)
)
hypothesis.settings.load_profile("same")

#: They decide what rich prints, and how wide; a CI sets some of them, a terminal others.
TERMINAL_VARIABLES = ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES")
#: Enough lanes for moves to show, few enough for topics to be made in a moment.
TEST_LANES = 8
#: A day: on a busy machine a test may outlast the minute for which the topics keep rankings.
NO_RETENTION = {"log.retention.check.interval.ms": "86400000"}

#: Where time is limited: the parts first, then the bus, then whole fleets, each file of which takes a minute or more.
ORDER = ("unit", "bus", "fuzz", "e2e")
BEGAN_S = pytest.StashKey[float]()
TOO_LATE = "it would begin after --begin-within"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("parallel", "tests/parallel.py").addoption(
        "--parallel", type=int, default=0, metavar="N", help="run tests in N forks of this process; 0: in this process"
    )
    group = parser.getgroup("long", "make test-long")
    group.addoption("--long-operations", type=int, default=1_000_000, help="operations in all (default 1,000,000)")
    group.addoption("--long-seed", type=int, default=1, help="seed of everything random in them (default 1)")
    parser.getgroup("needs", "tests/needs.py").addoption(
        "--no-missing", action="store_true", help="fail where a test is skipped for a program that is missing here"
    )
    parser.getgroup("limit", ".ci/run").addoption(
        "--begin-within",
        type=float,
        default=math.inf,
        help="begin no test later than so many seconds after the start: skip it; the parts come first",
    )
    group = parser.getgroup("faults", "make test-kafka")
    group.addoption("--away-seconds", type=float, default=15.0, help="how long all brokers are away (default 15)")
    group.addoption("--stopped-seconds", type=float, default=8.0, help="how long a worker is stopped (default 8)")
    group.addoption("--churn", type=int, default=6, help="joins and leaves within half a minute (default 6)")


def pytest_configure(config: pytest.Config) -> None:
    # A test that is named runs, whatever marks pyproject.toml leaves out.
    if any("::" in name for name in config.args) and not any(
        str(argument).startswith("-m") for argument in config.invocation_params.args
    ):
        config.option.markexpr = ""
    config.stash[BEGAN_S] = time.monotonic()
    if forks := config.getoption("--parallel"):
        config.pluginmanager.register(Parallel(forks))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What finds most in a second first, where not all may be begun."""
    if config.getoption("--begin-within") < math.inf:
        items.sort(key=lambda item: next((at for at, name in enumerate(ORDER) if name in item.path.parts), len(ORDER)))


def pytest_collection_finish() -> None:
    """Hypothesis also draws constants from our modules' source, as these are loaded. One that it finds in the middle
    of a test changes what it draws, and the test fails as flaky. So it takes those that are loaded by now, once."""
    found = providers._get_local_constants()
    setattr(providers, "_get_local_constants", lambda: found)  # noqa: B010  (mypy knows it as a function)
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """One reason, said in one line, for every test that finds no Kafka, and one for those that would begin too late."""
    if time.monotonic() - item.config.stash[BEGAN_S] > item.config.getoption("--begin-within"):
        pytest.skip(TOO_LATE)
    if item.get_closest_marker("kafka") and not {"KAFKA_HOME", "RELAYGR_TEST_BOOTSTRAP"} & os.environ.keys():
        needs.without(needs.KAFKA_HINT)


def _reasons(config: pytest.Config) -> list[str]:
    """Of the tests skipped in this run."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    return [str(report.longrepr[2]) for report in skipped if isinstance(report.longrepr, tuple | list)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--no-missing") and needs.summary(_reasons(session.config)):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What is missing, where something is, and how many tests were left out for lack of time."""
    reasons = _reasons(config)
    if line := needs.summary(reasons):
        terminalreporter.write_line(line, yellow=True, bold=True)
    if late := sum(TOO_LATE in reason for reason in reasons):
        within_s = config.getoption("--begin-within")
        terminalreporter.write_line(f"--- {late} tests not run: {TOO_LATE} of {within_s:g} s", yellow=True, bold=True)


@pytest.fixture
def long_run(request: pytest.FixtureRequest) -> LongRun:
    """How long, and with which seed."""
    return LongRun(request.config.getoption("--long-operations"), request.config.getoption("--long-seed"))


class RunningCluster:
    """A cluster named by RELAYGR_TEST_BOOTSTRAP: ours to use, not to stop."""

    def __init__(self, bootstrap: str) -> None:
        self.kind: BrokerKind = "kafka"
        self.bootstrap = bootstrap

    def kafka_settings(self, base: Kafka) -> Kafka:
        """`base`, pointed at this cluster."""
        return msgspec.structs.replace(base, bootstrap=self.bootstrap)


AnyBroker = LocalBroker | RunningCluster


class Brokers:
    """Starts brokers. Apache Kafka runs until `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runner = asyncio.Runner()
        self._ends = contextlib.AsyncExitStack()
        self._kafka: LocalBroker | None = None

    @contextlib.contextmanager
    def embedded(self) -> Iterator[LocalBroker]:
        """One that nobody has used."""
        context = local_broker("embedded", folder=self.folder)
        try:
            yield self._runner.run(context.__aenter__())
        finally:
            self._runner.run(context.__aexit__(None, None, None))

    def kafka(self) -> AnyBroker:
        """Apache Kafka: the cluster that RELAYGR_TEST_BOOTSTRAP names, or one started at its first use."""
        if running := os.environ.get("RELAYGR_TEST_BOOTSTRAP"):
            return RunningCluster(running)
        if self._kafka is None:
            node = dataclasses.replace(DEFAULT_NODE, properties=NO_RETENTION)
            context = local_broker("kafka", folder=self.folder, node=node)
            self._kafka = self._runner.run(self._ends.enter_async_context(context))
        return self._kafka

    def close(self) -> None:
        self._runner.run(self._ends.aclose())
        self._runner.close()


@pytest.fixture(autouse=True)
def _logs_as_at_the_start() -> None:
    """A process run inside a test configures logging; the next test must not inherit its level. Nor does it tell of
    lines that were held back in another test.

    Tracebacks are plain: rich takes a quarter of a second for each.
    """
    for each in list(limiter._all):
        each._windows.clear()
    structlog.reset_defaults()
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], renderer])


@pytest.fixture(scope="session", autouse=True)
def _any_terminal() -> Iterator[None]:
    """What is printed does not depend on where the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        for name in TERMINAL_VARIABLES:
            patch.delenv(name, raising=False)
        patch.setenv("TERM", "xterm")
        yield


@pytest.fixture(scope="session", autouse=True)
def _forks(_any_terminal: None) -> Iterator[None]:
    """Workers and triggers share their imports."""
    with forking():
        yield


@pytest.fixture(autouse=True)
def _time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a child may need longer to import, or to close its connections, than the 15 s after which it is
    killed."""
    monkeypatch.setattr("relaygr_stream.ops.children.STOP_TIMEOUT_S", WITHIN_S)


@pytest.fixture(autouse=True)
def _embedded_broker_asked_little(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seldom; and for one topic by a client that starts, which it would tell of all: with those of twenty tests, half
    of the processor time of such a test."""
    monkeypatch.setattr(embedded, "EMBEDDED_FETCH_WAIT_MS", SELDOM_MS)
    if not {"kafka", "faults"} & {each.name for each in request.node.iter_markers()}:
        monkeypatch.setattr(AIOKafkaConnection, "send", _send_with_a_topic)


def _send_with_a_topic(self: Any, request: Any, expect_response: bool = True) -> Any:
    """As the package's `send`. To the embedded broker no topic in a request for metadata means all: it names one."""
    if isinstance(request, MetadataRequest) and isinstance(self._client_id, aiokafka_patches.ClientId):
        request._topics = request._topics or ["none"]
    return aiokafka_patches.send(self, request, expect_response)


@pytest.fixture(scope="session")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    brokers = Brokers(tmp_path_factory.mktemp("brokers"))
    yield brokers
    brokers.close()


@pytest.fixture(scope="module")
def embedded_broker(brokers: Brokers) -> Iterator[LocalBroker]:
    """The embedded broker, for tests whose subject is not the broker.

    Each file has its own, for it slows with its topics and records: it tells every client that starts of all topics.
    """
    with brokers.embedded() as broker:
        yield broker


@pytest.fixture(scope="module", params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def broker(request: pytest.FixtureRequest, brokers: Brokers) -> AnyBroker:
    """Each broker at hand."""
    if request.param == "embedded":
        embedded: LocalBroker = request.getfixturevalue("embedded_broker")
        return embedded
    return brokers.kafka()


def _unique_settings(broker: AnyBroker) -> Kafka:
    """Settings with names that no other test uses."""
    kafka = broker.kafka_settings(Kafka(prefix=f"test-{uuid.uuid4().hex[:10]}.", partitions=TEST_LANES, replication=1))
    if isinstance(broker, LocalBroker):  # another's cluster may allow no shorter sessions than the default
        kafka = msgspec.structs.replace(kafka, session_timeout_ms=3000)
    return kafka


@pytest.fixture
def kafka_settings(broker: AnyBroker) -> Kafka:
    """How to reach `broker`, with a topic prefix of this test's own."""
    return _unique_settings(broker)


@pytest.fixture
def embedded_settings(embedded_broker: LocalBroker) -> Kafka:
    """The same on the embedded broker alone."""
    return _unique_settings(embedded_broker)
