from __future__ import annotations

import hashlib
import io
import json
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.settings.schema import Settings, Telemetry
from relaygr_stream.telemetry.logs import configure_logging, hash_user_ids, hide_and_shorten, request_log_fields
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.messages import RankingRequest

JSON = Telemetry(log_format="json")


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    out, err = capsys.readouterr()
    assert out == ""
    return [json.loads(line) for line in err.splitlines()]


def test_a_json_line_about_a_request_has_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(JSON, "worker", worker="w1")
    structlog.get_logger("some.module").info("answered", **request_log_fields("r1", "u1", 3, "hbm"))
    (line,) = lines(capsys)
    when = datetime.fromisoformat(line.pop("timestamp"))
    assert when.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - when) < timedelta(minutes=1)
    assert line == {
        "level": "info",
        "process": "worker",
        "event": "answered",
        "request_id": "r1",
        "user_id": "u1",
        "lane": 3,
        "outcome": "hbm",
        "logger": "some.module",
        "worker": "w1",
    }


def test_console_lines_are_for_reading(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Telemetry(log_format="console"), "trigger")
    structlog.get_logger().warning("lane lost", lane=4)
    err = capsys.readouterr().err
    assert "lane lost" in err
    assert "lane=4" in err
    assert "\x1b" not in err, "no colour codes where stderr is not a terminal"


def test_what_a_message_brought_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Telemetry(log_format="console"), "trigger")
    structlog.get_logger().warning("refused\x1b[2J", user_id="\x9b31m\x07", detail="a\r\nlevel=error")
    written = capsys.readouterr().err
    assert written.count("\n") == 1
    assert not [each for each in written[:-1] if ord(each) < 32 or 127 <= ord(each) < 160]


def test_auto_means_json_where_stderr_is_no_terminal_and_console_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, is_json in ((io.StringIO(), True), (Terminal(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        configure_logging(Telemetry(), "worker")
        structlog.get_logger().info("hello")
        assert stream.getvalue().startswith("{") is is_json


def test_lines_below_the_level_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Telemetry(log_format="json", log_level="warning"), "worker")
    log = structlog.get_logger()
    log.debug("a")
    log.info("b")
    log.warning("c")
    assert [line["event"] for line in lines(capsys)] == ["c"]


def test_stdlib_logging_takes_the_same_way_from_warning_on(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(JSON, "worker")
    library = logging.getLogger("aiokafka.conn")
    library.info("chatter")
    library.warning("lost %s", "node 1")
    library.log(35, "a level of its own")
    try:
        raise ValueError("boom")
    except ValueError:
        library.exception("failed")
    first, odd, failed = lines(capsys)
    assert (first["event"], first["level"], first["logger"], first["process"]) == (
        "lost node 1",
        "warning",
        "aiokafka.conn",
        "worker",
    )
    assert odd["level"] == "warning"
    assert failed["exception"].endswith("ValueError: boom")


def test_expected_rebalance_warnings_are_kept_at_debug(capsys: pytest.CaptureFixture[str]) -> None:
    warning = ("Heartbeat failed for group %s because it is rebalancing", "workers")
    configure_logging(JSON, "worker")
    logging.getLogger("aiokafka.consumer.group_coordinator").warning(*warning)
    assert lines(capsys) == []
    configure_logging(Telemetry(log_format="json", log_level="debug"), "worker")
    logging.getLogger("aiokafka.consumer.group_coordinator").warning(*warning)
    (line,) = lines(capsys)
    assert line["level"] == "debug"


def test_a_library_in_trouble_does_not_flood_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(JSON, "worker")
    for node in range(1000):
        logging.getLogger("aiokafka").warning("no connection to node %s", node)
    assert len(lines(capsys)) == 5


def test_user_ids_are_hashed_with_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Telemetry(log_format="json", hash_user_ids=True, hash_key="pepper"), "worker")
    structlog.get_logger().info("answered", **request_log_fields("r1", "alice"))
    (line,) = lines(capsys)
    assert line["user_id"] == hashlib.blake2b(b"alice", key=b"pepper", digest_size=6).hexdigest()
    assert len(line["user_id"]) == 12
    assert line["request_id"] == "r1"


def hashed(key: str, user: str) -> str:
    event = hash_user_ids(key)(None, "info", {"event": "x", "user_id": user})
    assert isinstance(event, dict)
    return str(event["user_id"])


def test_hashes_depend_on_the_key_and_an_empty_key_is_a_new_one_each_time() -> None:
    assert hashed("a", "alice") == hashed("a", "alice")
    assert hashed("a", "alice") != hashed("b", "alice")
    assert hashed("", "alice") != hashed("", "alice")
    long = "k" * 1000  # longer than BLAKE2b's longest key
    assert hashed(long, "alice") != hashed(long + "k", "alice")


@given(st.text(max_size=300), st.text(min_size=1, max_size=100))
def test_a_hash_is_twelve_hex_digits_whatever_the_id(user: str, key: str) -> None:
    value = hashed(key, user)
    assert len(value) == 12
    assert set(value) <= set("0123456789abcdef")


def test_a_line_without_a_user_gets_none() -> None:
    assert hash_user_ids("k")(None, "info", {"event": "x"}) == {"event": "x"}


def test_secrets_payloads_and_long_values_do_not_get_into_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    request = RankingRequest(request_id="r", user_id="u", prefix=Behaviours(), candidates=b"1234")
    configure_logging(JSON, "worker")
    structlog.get_logger().info(
        "x",
        hash_key="pepper",
        sasl_password="hunter2",
        settings=Settings(telemetry=Telemetry(hash_key="pepper")),
        request=request,
        value=b"\x00" * 4096,
        detail="y" * 5000,
        short="z",
        lanes=[1, 2],
    )
    (line,) = lines(capsys)
    text = json.dumps(line)
    assert "pepper" not in text
    assert "hunter2" not in text
    assert line["request"] == "<RankingRequest>"
    assert line["value"] == "<4096 bytes>"
    assert line["detail"] == "y" * 500 + "… (5000 characters)"
    assert (line["short"], line["lanes"]) == ("z", [1, 2])


def test_a_long_traceback_keeps_its_end() -> None:
    event = hide_and_shorten(None, "error", {"event": "x", "exception": "top" + "." * 30_000 + "the cause"})
    assert isinstance(event, dict)
    assert event["exception"].endswith("the cause")
    assert len(event["exception"]) < 21_000


def test_a_value_that_json_does_not_know_is_told_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(JSON, "worker")
    structlog.get_logger().info("x", path=Path("a/b"), error=ValueError("boom"))
    (line,) = lines(capsys)
    assert (line["path"], line["error"]) == ("a/b", "boom")


def test_a_closed_stderr_does_not_fail_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, later = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging(JSON, "worker")
    stream.close()
    structlog.get_logger().error("nobody reads this")
    monkeypatch.setattr("sys.stderr", later)
    configure_logging(JSON, "worker")
    structlog.get_logger().error("read again")
    assert "read again" in later.getvalue()


def test_errors_that_asyncio_reports_are_limited_whatever_task_they_name(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(JSON, "worker")
    for number in range(50):
        text = f"Task exception was never retrieved\nfuture: <Task name='Task-{number}'>"
        logging.getLogger("asyncio").error(text)
    assert len(lines(capsys)) == 5
