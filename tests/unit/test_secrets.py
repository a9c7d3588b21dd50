"""Secrets come from the environment or from files, and are shown nowhere: property over every setting that is one."""

from __future__ import annotations

import io
import json
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from relaygr_stream.bus.aiokafka_compat import bootstrap_addresses, client_options, security_options
from relaygr_stream.cli.config_table import render_settings_table
from relaygr_stream.cli.options import parse_flags
from relaygr_stream.errors import ConfigError
from relaygr_stream.handover.certificates import make_credentials
from relaygr_stream.settings.load import ENV_FILE, FIELDS, MAX_SECRET_FILE, load_settings
from relaygr_stream.settings.schema import Kafka, Settings, Telemetry
from relaygr_stream.settings.worker import Handover
from relaygr_stream.telemetry.logs import configure_logging
from relaygr_stream.telemetry.printable import render_plain
from tests.properties import examples

SECRET_KEYS = sorted(key for key, field in FIELDS.items() if field.is_secret)
#: Control characters have no place in an environment. No source or message has the first character: hypothesis also
#: draws strings that stand in the source, such as the names of settings.
VALUES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=20, max_size=40).map("¤".__add__)


def said(call: Callable[[], object]) -> str:
    """What the user sees where the call fails: the error, and the whole traceback with its causes."""
    try:
        return repr(call())
    except ConfigError as error:
        return str(error) + "".join(traceback.format_exception(error))


@hypothesis_settings(max_examples=examples(20))
@given(st.fixed_dictionaries(dict.fromkeys(SECRET_KEYS, VALUES)), st.sampled_from(["PLAINTEXT", "SASL_PLAINTEXT"]))
def test_no_secret_is_shown_anywhere(secrets: dict[str, str], protocol: str) -> None:
    environ = {FIELDS[key].env: value for key, value in secrets.items()}
    config = load_settings(environ=environ | {"RELAYGR_KAFKA_SECURITY_PROTOCOL": protocol})
    settings = config.settings
    shown = [
        repr(config),
        repr(config.values),
        repr(settings),
        str(settings),
        *(repr(getattr(settings, section)) for section in settings.__struct_fields__),
        render_plain(render_settings_table(config)),
        said(lambda: security_options(settings.kafka) and None),
        *(said(lambda key=key: load_settings(flags={key: secrets[key]}, environ={})) for key in SECRET_KEYS),  # type: ignore[misc]
        *(said(lambda key=key: parse_flags((f"{key} {secrets[key]}",))) for key in SECRET_KEYS),  # type: ignore[misc]
        said(lambda: load_settings(environ={FIELDS["handover.secret"].env: secrets["handover.secret"][:15]}))
        if len(set(secrets["handover.secret"][:15])) > 5
        else "",
        logged(settings),
    ]
    for key, value in secrets.items():
        for text in shown:
            assert value not in text, f"{key} is shown in {text[:500]}"
    assert secrets["handover.secret"][:15] not in shown[-2]


def logged(settings: Settings) -> str:
    text = io.StringIO()
    with redirect_stderr(text):
        configure_logging(Telemetry(log_format="json"), "test")
        log = structlog.get_logger()
        log.warning("start", settings=settings, kafka=[settings.kafka], secret=settings.handover.secret)
        try:
            raise ConfigError(f"with {settings}")
        except ConfigError:
            log.exception("failed", sections={"handover": settings.handover})
    return json.dumps([json.loads(line) for line in text.getvalue().splitlines()], ensure_ascii=False)


PASSWORD = "correct-horse-battery"


@pytest.mark.parametrize("url", [f"sasl://u:{PASSWORD}@kafka:9092", f"u:{PASSWORD}@kafka:9092"])
def test_a_password_in_the_bootstrap_address_is_refused_and_not_quoted(url: str) -> None:
    for call in (
        lambda: load_settings(environ={"RELAYGR_KAFKA_BOOTSTRAP": url}),
        lambda: load_settings(flags={"kafka.bootstrap": url}, environ={}),
        lambda: bootstrap_addresses(Kafka(bootstrap=url)),
        lambda: client_options(Kafka(bootstrap=url), "me"),
    ):
        with pytest.raises(ConfigError, match=r"kafka\.bootstrap"):
            call()
        assert PASSWORD not in said(call)
    assert PASSWORD not in repr(Kafka(bootstrap=url))


@pytest.mark.parametrize(
    "address", ["kafka", "kafka:", "kafka:0", "kafka:65536", "kafka:99999999", "kafka:９", "a:1,b:x"]
)
def test_a_bootstrap_address_without_a_port_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="write HOST:PORT, with a port from 1 to 65535"):
        bootstrap_addresses(Kafka(bootstrap=address))


def test_what_is_wrong_with_certificates_does_not_show_the_secret() -> None:
    settings = Handover(secret=PASSWORD, tls_ca="/none", tls_certificate="/none")
    assert PASSWORD not in said(lambda: make_credentials(settings, "w", "h"))


# ---- secrets from files ----


@pytest.mark.parametrize(
    ("key", "end"), [*((key, "\n") for key in SECRET_KEYS), (SECRET_KEYS[0], ""), (SECRET_KEYS[0], "\r\n")]
)
def test_a_secret_comes_from_a_file_without_its_line_end(key: str, end: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(f" {PASSWORD} ß{end}".encode())
    config = load_settings(environ={FIELDS[key].env + ENV_FILE: str(file)})
    section, _, name = key.partition(".")
    assert getattr(getattr(config.settings, section), name) == f" {PASSWORD} ß"
    shown = render_plain(render_settings_table(config))
    assert PASSWORD not in shown
    assert str(file) in shown


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"\xff" + PASSWORD.encode(), "not text in UTF-8"),
        (b"x" * (MAX_SECRET_FILE + 1), "more than 64 KiB"),
        (b"too short", "16 characters"),
        (None, "cannot be read: .*No such file"),
    ],
)
def test_a_file_that_holds_no_secret_is_refused_by_name(content: bytes | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    environ = {"RELAYGR_HANDOVER_SECRET_FILE": str(file)}
    with pytest.raises(ConfigError, match=rf"RELAYGR_HANDOVER_SECRET_FILE \({file}\).*{words}"):
        load_settings(environ=environ)
    shown = said(lambda: load_settings(environ=environ))
    assert PASSWORD not in shown
    assert "too short" not in shown


def test_a_secret_in_the_environment_is_the_same_with_a_line_end() -> None:
    """Files made by `echo` have one, and what is made of them by Kubernetes."""
    environ = {"RELAYGR_RELAY_ANSWER_SECRET": "sixteen characters and more\r\n"}
    assert load_settings([], {}, environ).settings.relay.answer_secret == "sixteen characters and more"


def test_both_forms_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="both RELAYGR_HANDOVER_SECRET and RELAYGR_HANDOVER_SECRET_FILE"):
        load_settings(environ={"RELAYGR_HANDOVER_SECRET": PASSWORD, "RELAYGR_HANDOVER_SECRET_FILE": "/x"})


def test_only_secrets_come_from_files() -> None:
    with pytest.raises(ConfigError, match="RELAYGR_WORKER_NAME_FILE: no such setting"):
        load_settings(environ={"RELAYGR_WORKER_NAME_FILE": "/x"})
    assert load_settings(environ={"RELAYGR_TELEMETRY_PORT_FILE": "/x"}).settings.telemetry.port_file == "/x"


# ---- a password in the clear ----


def test_plain_without_tls_is_refused_unless_allowed() -> None:
    plain = {"sasl_mechanism": "PLAIN", "sasl_username": "u", "sasl_password": PASSWORD}
    in_the_clear = Kafka(security_protocol="SASL_PLAINTEXT", **plain)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"in the clear.*kafka\.plain_without_tls"):
        security_options(in_the_clear)
    allowed = Kafka(security_protocol="SASL_PLAINTEXT", plain_without_tls=True, **plain)  # type: ignore[arg-type]
    assert security_options(allowed)["sasl_mechanism"] == "PLAIN"
    assert security_options(Kafka(security_protocol="SASL_SSL", **plain))["sasl_mechanism"] == "PLAIN"  # type: ignore[arg-type]
