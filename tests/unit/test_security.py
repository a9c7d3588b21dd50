"""Settings of SASL and TLS that clash, or name files of no use, are refused in words."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

from relaygr_stream.bus.aiokafka_compat import security_options
from relaygr_stream.cli.config_table import render_settings_table
from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.load import FIELDS, RETIRED, load_settings
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.settings.section import SECRETS
from relaygr_stream.telemetry.printable import render_plain


@pytest.fixture
def pem(tmp_path: Path) -> dict[str, str]:
    ca = trustme.CA()
    own = ca.issue_cert("me@relay.test")
    parts = {"ca": ca.cert_pem, "certificate": own.cert_chain_pems[0], "key": own.private_key_pem}
    for name, blob in parts.items():
        blob.write_to_path(tmp_path / name)
    (tmp_path / "nonsense").write_text("not a certificate")
    return {name: str(tmp_path / name) for name in (*parts, "nonsense")}


def test_plaintext_is_the_default_and_sends_nothing() -> None:
    assert security_options(Kafka()) == {"security_protocol": "PLAINTEXT"}


def test_tls_checks_the_certificate_and_the_host(pem: dict[str, str]) -> None:
    mine = {"tls_ca": pem["ca"], "tls_certificate": pem["certificate"], "tls_key": pem["key"]}
    context = security_options(Kafka(security_protocol="SSL", **mine))["ssl_context"]  # type: ignore[arg-type]
    assert (context.check_hostname, context.verify_mode) == (True, ssl.CERT_REQUIRED)
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sasl_username": "u"}, "SASL_SSL"),
        ({"security_protocol": "SSL", "sasl_password": "geheim"}, "sends no credentials"),
        ({"security_protocol": "SASL_SSL", "sasl_username": "u"}, "RELAYGR_KAFKA_SASL_PASSWORD"),
        ({"tls_ca": "/x"}, "does not encrypt"),
        ({"security_protocol": "SSL", "tls_ca": "/no/such/file"}, r"`tls\.ca` = '/no/such/file': no such file"),
        ({"security_protocol": "SSL", "tls_ca": "{nonsense}"}, "not certificates in PEM form"),
        ({"security_protocol": "SSL", "tls_key": "{key}"}, "without `tls.certificate`"),
        ({"security_protocol": "SSL", "tls_certificate": "{certificate}"}, "not a certificate and its key"),
        ({"security_protocol": "SSL", "tls_certificate": "{certificate}", "tls_key": "{nonsense}"}, "and its key"),
    ],
)
def test_what_clashes_is_refused(settings: dict[str, Any], message: str, pem: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        security_options(Kafka(**{name: value.format(**pem) for name, value in settings.items()}))
    assert "geheim" not in str(raised.value)


def test_secrets_come_by_environment_or_file_never_by_flag(tmp_path: Path) -> None:
    config = load_settings(environ={"RELAYGR_KAFKA_SASL_PASSWORD": "geheim"})
    assert config.settings.kafka.sasl_password == "geheim"
    assert "geheim" not in render_plain(render_settings_table(config))
    with pytest.raises(ConfigError, match="RELAYGR_KAFKA_SASL_PASSWORD") as raised:
        load_settings(flags={"kafka.sasl_password": "geheim"}, environ={})
    assert "geheim" not in str(raised.value)


def test_no_representation_shows_a_secret() -> None:
    assert {key.partition(".")[2] for key, field in (FIELDS | RETIRED).items() if field.is_secret} == SECRETS
    settings = load_settings(
        environ={FIELDS[key].env: "geheim" * 3 for key in FIELDS if FIELDS[key].is_secret}
    ).settings
    assert "geheim" not in repr(settings)
    assert "sasl_password=********" in repr(settings)
    assert "sasl_password=''" in repr(Kafka())
