"""Settings of SASL and TLS that clash, or name files of no use, are refused in words."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import struct
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiokafka.errors import KafkaConnectionError

from relaygr_stream.bus import broker_errors
from relaygr_stream.bus.aiokafka_compat import broker_error, security_options
from relaygr_stream.bus.broker_errors import no_broker
from relaygr_stream.bus.probe import check_connection
from relaygr_stream.cli.config_table import render_settings_table
from relaygr_stream.errors import AccessDenied, BrokerUnavailable, ConfigError
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


@pytest.mark.parametrize(
    ("host", "days", "said"),
    [
        ("localhost", -1, "has expired; renew it, or set the clock"),
        ("kafka.example", 1, "made out to that host"),
        ("localhost", 1, r"is `tls\.ca` \(.*\) its authority"),
    ],
)
async def test_why_a_brokers_certificate_is_not_accepted_and_what_to_do(
    host: str, days: int, said: str, tmp_path: Path
) -> None:
    ca, other = trustme.CA(), trustme.CA()
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    until = datetime.now(UTC) + timedelta(days=days)
    ca.issue_cert(host, not_before=until - timedelta(days=9), not_after=until).configure_cert(served)
    trusted = ca if "authority" not in said else other
    trusted.cert_pem.write_to_path(tmp_path / "ca")
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "localhost", 0, ssl=served)
    async with server:
        port = server.sockets[0].getsockname()[1]
        kafka = Kafka(security_protocol="SSL", bootstrap=f"localhost:{port}", tls_ca=str(tmp_path / "ca"))
        with pytest.raises(AccessDenied, match=said):
            await check_connection(kafka)
        context = security_options(kafka)["ssl_context"]
        with pytest.raises(ssl.SSLCertVerificationError):  # as of a process that runs, when brokers have it anew
            await broker_errors.create_conn("localhost", port, security_protocol="SSL", ssl_context=context)
        told = f"no Kafka broker answers at localhost:{port} \\(localhost:{port}: .*certificate verify failed"
        assert re.match(told, no_broker(kafka.bootstrap))
        assert re.match(f"cannot read: {told}", str(broker_error(kafka, "read", KafkaConnectionError())))


async def test_a_listener_that_resets_connections_may_be_one_of_another_protocol() -> None:
    def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    async with await asyncio.start_server(reset, "127.0.0.1", 0) as server:
        bootstrap = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(BrokerUnavailable, match="is the listener one for SSL"):
            await check_connection(Kafka(security_protocol="SSL", bootstrap=bootstrap))


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
