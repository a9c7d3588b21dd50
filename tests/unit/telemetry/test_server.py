from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from relaygr_stream.errors import ConfigError
from relaygr_stream.telemetry.pages import MAX_CLIENTS, MAX_REQUEST
from relaygr_stream.telemetry.server import TelemetryServer
from tests.waiting import WITHIN_S


class Checks:
    live: str | None = None
    ready: str | None = None


@pytest.fixture
def checks() -> Checks:
    return Checks()


@pytest.fixture
def server(checks: Checks) -> Iterator[TelemetryServer]:
    registry = CollectorRegistry()
    Counter("relaygr_things", "Things.", registry=registry).inc(3)
    server = TelemetryServer(registry, "127.0.0.1", 0, lambda: checks.live, lambda: checks.ready)
    server.start()
    yield server
    server.stop()


def request(
    server: TelemetryServer, path: str, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """(status, content type, body)"""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WITHIN_S)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read().decode()
    finally:
        connection.close()


def test_metrics_as_prometheus_text(server: TelemetryServer) -> None:
    status, kind, body = request(server, "/metrics")
    assert status == 200
    assert kind.startswith("text/plain")
    values = {sample.name: sample.value for family in parse_text(body) for sample in family.samples}
    assert values["relaygr_things_total"] == 3


def test_readiness_is_a_metric_too(server: TelemetryServer, checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaygr_stream.telemetry.exposition.FRESH_S", 0.0)
    for reason, value in (("no broker answers", 0.0), (None, 1.0)):
        checks.ready = reason
        assert f"relaygr_ready {value}\n" in request(server, "/metrics")[2]


def test_metrics_as_openmetrics_where_the_scraper_asks(server: TelemetryServer) -> None:
    status, kind, body = request(
        server, "/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
    )
    assert status == 200
    assert kind.startswith("application/openmetrics-text")
    families = parse_openmetrics(body)  # type: ignore[no-untyped-call]
    assert [family.name for family in families] == ["relaygr_things", "relaygr_ready"]


@pytest.mark.parametrize("version", ["abc", "1.x", "9" * 5000])
@pytest.mark.parametrize("media", ["application/openmetrics-text", "text/plain"])
def test_metrics_where_the_version_asked_for_is_none(server: TelemetryServer, media: str, version: str) -> None:
    status, kind, body = request(server, "/metrics", headers={"Accept": f"{media};version={version}"})
    assert (status, kind.startswith("text/plain")) == (200, True)
    assert "relaygr_things_total 3.0" in body


def test_what_a_process_serves_is_said_while_it_is_ready() -> None:
    about = {"scenario": "feed"}
    server = TelemetryServer(CollectorRegistry(), "127.0.0.1", 0, lambda: None, lambda: None, about)
    server.start()
    try:
        assert json.loads(request(server, "/readyz")[2]) == {"status": "ok", "scenario": "feed"}
        about.update(scenario="search")
        assert json.loads(request(server, "/readyz")[2])["scenario"] == "search"
    finally:
        server.stop()


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_follows_its_own_check(server: TelemetryServer, checks: Checks, path: str) -> None:
    assert request(server, path)[0] == 200
    assert json.loads(request(server, path)[2]) == {"status": "ok"}
    setattr(checks, "live" if path == "/healthz" else "ready", "the device hangs")
    status, kind, body = request(server, path)
    assert (status, kind) == (503, "application/json")
    assert json.loads(body) == {"status": "unavailable", "reason": "the device hangs"}
    other = "/readyz" if path == "/healthz" else "/healthz"
    assert request(server, other)[0] == 200


def test_a_check_that_fails_counts_as_no() -> None:
    def broken() -> str | None:
        raise ZeroDivisionError("oops")

    server = TelemetryServer(CollectorRegistry(), "127.0.0.1", 0, broken, lambda: None)
    server.start()
    try:
        status, _, body = request(server, "/healthz")
    finally:
        server.stop()
    assert status == 503
    assert "ZeroDivisionError: oops" in json.loads(body)["reason"]


def test_other_paths_are_told_what_there_is(server: TelemetryServer) -> None:
    status, _, body = request(server, "/nowhere")
    assert status == 404
    assert body == "Nothing at '/nowhere'. The paths are /metrics, /healthz, /readyz.\n"


def test_only_reading_is_possible(server: TelemetryServer) -> None:
    assert request(server, "/healthz", "POST")[0] == 405
    assert request(server, "/metrics", "DELETE")[0] == 405
    for path in ("/healthz", "/metrics"):
        status, _, body = request(server, path, "HEAD")
        assert (status, body) == (200, "")


def test_silent_clients_hold_up_nobody(server: TelemetryServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3):  # one after the other, they would take 3 × 5 s; the request below waits 10 s at most
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        assert request(server, "/healthz")[0] == 200


def test_garbage_gets_an_answer_and_changes_nothing(server: TelemetryServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=WITHIN_S) as client:
        client.sendall(b"\x16\x03\x01 not http\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 405 ")
    assert request(server, "/healthz")[0] == 200


def test_a_taken_port_is_a_config_error_that_names_it(server: TelemetryServer) -> None:
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{server.port}.*telemetry\.port"):
        TelemetryServer(CollectorRegistry(), "127.0.0.1", server.port, lambda: None, lambda: None)


def test_a_host_that_is_not_ours_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0.*telemetry\.host"):
        TelemetryServer(CollectorRegistry(), "192.0.2.1", 0, lambda: None, lambda: None)


def test_stop_ends_the_thread_and_frees_the_port() -> None:
    server = TelemetryServer(CollectorRegistry(), "127.0.0.1", 0, lambda: None, lambda: None)
    server.start()
    server.stop()
    server.stop()
    assert "telemetry" not in {thread.name for thread in threading.enumerate()}
    again = TelemetryServer(CollectorRegistry(), "127.0.0.1", server.port, lambda: None, lambda: None)
    again.stop()


def test_ipv6() -> None:
    try:
        server = TelemetryServer(CollectorRegistry(), "::1", 0, lambda: None, lambda: None)
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback address")
    server.start()
    try:
        assert server.address == f"[::1]:{server.port}"
        connection = http.client.HTTPConnection("::1", server.port, timeout=WITHIN_S)
        connection.request("GET", "/readyz")
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        server.stop()


def test_clients_that_never_end_their_request_keep_nobody_out(server: TelemetryServer) -> None:
    """Each sends a byte now and then, which no timeout on silence ends; there are more of them than are held."""
    with contextlib.ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(MAX_CLIENTS + 20)
        ]
        threads = threading.active_count()
        for path in ("/healthz", "/readyz", "/metrics"):
            for client in slow:
                with contextlib.suppress(OSError):
                    client.sendall(b"GET /metrics HTTP/1.1\r\nX: a")
            assert request(server, path)[0] == 200
        assert threading.active_count() <= threads


def test_a_request_has_a_time_in_all(server: TelemetryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaygr_stream.telemetry.server.REQUEST_S", 0.2)
    address, sent = ("127.0.0.1", server.port), 0
    with socket.create_connection(address, timeout=WITHIN_S) as client, contextlib.suppress(ConnectionError):
        while True:  # until it hangs up, which `send` tells of
            client.sendall(b"X")
            sent += 1
            if select.select([client], [], [], 0.01)[0]:
                assert client.recv(1) == b""
                break
    assert sent < MAX_REQUEST, "it hung up because of the length"


def test_an_endless_header_is_hung_up_on(server: TelemetryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaygr_stream.telemetry.server.REQUEST_S", 600.0)
    address = ("127.0.0.1", server.port)
    with socket.create_connection(address, timeout=WITHIN_S) as client, contextlib.suppress(ConnectionError):
        client.sendall(b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * MAX_REQUEST)
        assert client.recv(1) == b""


OUT_OF_DESCRIPTORS = """
import http.client, os, resource, socket, time
from prometheus_client import CollectorRegistry
from relaygr_stream.telemetry.pages import MAX_CLIENTS, MAX_REQUEST
from relaygr_stream.telemetry.server import TelemetryServer
server = TelemetryServer(CollectorRegistry(), "127.0.0.1", 0, lambda: None, lambda: None)
server.start()
client = socket.socket()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
client.connect(("127.0.0.1", server.port))  # the kernel takes it; nobody can accept it
client.sendall(b"GET /healthz HTTP/1.0\\r\\n\\r\\n")
before = time.process_time()
time.sleep(1.0)  # it may not spin meanwhile
spent = time.process_time() - before
for each in taken:
    os.close(each)
print(client.recv(12).decode(), "busy" if spent > 0.5 else "idle")
client.close()
server.stop()
"""


def test_where_descriptors_end_it_waits_and_serves_again() -> None:
    ran = subprocess.run([sys.executable, "-c", OUT_OF_DESCRIPTORS], capture_output=True, text=True, check=True)
    assert "HTTP/1.1 200 idle" in ran.stdout, ran.stdout + ran.stderr
