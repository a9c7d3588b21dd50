"""How a client shows a broker who it is, and checks who the broker is: SASL and TLS, from the settings.

Knows nothing of connections. Secrets appear in no message.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, Final

from relaygr_stream.errors import ConfigError
from relaygr_stream.settings import Kafka

_TLS_FILES: Final = ("tls_ca", "tls_certificate", "tls_key")


def security_options(kafka: Kafka) -> dict[str, Any]:
    """aiokafka's options for `kafka.security_protocol`. ConfigError where settings clash or a file is of no use."""
    protocol = kafka.security_protocol
    sasl, tls = protocol.startswith("SASL"), protocol.endswith("SSL")
    options: dict[str, Any] = {"security_protocol": protocol}
    if sasl:
        if not (kafka.sasl_username and kafka.sasl_password):
            raise ConfigError(
                f"`kafka.security_protocol` = {protocol} needs `kafka.sasl_username` and `kafka.sasl_password` "
                f"(RELAYGR_KAFKA_SASL_PASSWORD, or a settings file that others cannot read)"
            )
        if kafka.sasl_mechanism == "PLAIN" and not tls and not kafka.plain_without_tls:
            raise ConfigError(
                f"`kafka.sasl_mechanism` = PLAIN with `kafka.security_protocol` = {protocol} sends the password in the "
                f"clear; use SASL_SSL or SCRAM-SHA-512, or allow it with kafka.plain_without_tls = true"
            )
        options |= {
            "sasl_mechanism": kafka.sasl_mechanism,
            "sasl_plain_username": kafka.sasl_username,
            "sasl_plain_password": kafka.sasl_password,
        }
    elif kafka.sasl_username or kafka.sasl_password:
        raise ConfigError(
            f"`kafka.sasl_username` is set, but `kafka.security_protocol` = {protocol} sends no credentials; set it to "
            f"SASL_SSL (or SASL_PLAINTEXT inside a trusted network)"
        )
    if tls:
        options["ssl_context"] = _tls_context(kafka)
    else:
        given = [f"`kafka.{name}`" for name in _TLS_FILES if getattr(kafka, name)]
        if given:
            raise ConfigError(
                f"{', '.join(given)} is set, but `kafka.security_protocol` = {protocol} does not encrypt; set it to "
                f"{'SASL_SSL' if sasl else 'SSL'}"
            )
    return options


def _tls_context(kafka: Kafka) -> ssl.SSLContext:
    """Checks the broker's certificate and that it names the host we asked for; there is no setting against that."""
    for name in _TLS_FILES:
        path = getattr(kafka, name)
        if path and not Path(path).is_file():
            raise ConfigError(f"`kafka.{name}` = {path!r}: no such file")
    try:
        context = ssl.create_default_context(cafile=kafka.tls_ca or None)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"`kafka.tls_ca` = {kafka.tls_ca!r}: not certificates in PEM form ({error})") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if kafka.tls_key and not kafka.tls_certificate:
        raise ConfigError("`kafka.tls_key` is set without `kafka.tls_certificate`")
    if kafka.tls_certificate:
        try:
            context.load_cert_chain(
                kafka.tls_certificate, kafka.tls_key or None, password=lambda: kafka.tls_key_password
            )
        except (ssl.SSLError, OSError, ValueError) as error:
            raise ConfigError(
                f"`kafka.tls_certificate` = {kafka.tls_certificate!r}, `kafka.tls_key` = {kafka.tls_key!r}: not a "
                f"certificate and its key in PEM form, or `kafka.tls_key_password` is not the key's ({error})"
            ) from error
    return context
