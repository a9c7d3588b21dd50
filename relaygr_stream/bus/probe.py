"""Finds out at start why no broker can be used, because aiokafka reports the cause in its own log only."""

from __future__ import annotations

import asyncio
import ssl
from typing import Final

from aiokafka.conn import AIOKafkaConnection, create_conn
from aiokafka.errors import KafkaConnectionError, KafkaError, UnsupportedSaslMechanismError

from relaygr_stream.bus.aiokafka_compat import CLOSE_S, bootstrap_addresses, client_options
from relaygr_stream.errors import AccessDenied, BrokerUnavailable
from relaygr_stream.settings.inputs import read_bytes
from relaygr_stream.settings.schema import Kafka

#: The options of `client_options` that a single connection accepts.
_OF_A_CONNECTION: Final = (
    "client_id", "request_timeout_ms", "ssl_context", "security_protocol",
    "sasl_mechanism", "sasl_plain_username", "sasl_plain_password",
)  # fmt: skip
#: OpenSSL's checks that fail by the time, X509_V_ERR_CERT_NOT_YET_VALID and _HAS_EXPIRED, and those by the name,
#: X509_V_ERR_HOSTNAME_MISMATCH and _IP_ADDRESS_MISMATCH.
_OF_TIME: Final = (9, 10)
_OF_NAME: Final = (62, 64)


async def check_connection(kafka: Kafka) -> None:
    """Check that one of the bootstrap addresses accepts a connection.

    Raises AccessDenied if credentials or certificates are the cause, else BrokerUnavailable, with the error of each
    address. Raises ConfigError for settings that clash.
    """
    options = client_options(kafka, "relaygr-probe")
    options = {name: options[name] for name in _OF_A_CONNECTION if name in options}
    denied, causes = False, []
    opened: list[AIOKafkaConnection] = []  # closed again, by aiokafka or below

    def on_close(connection: AIOKafkaConnection, _: object) -> None:
        opened.append(connection)

    for address in bootstrap_addresses(kafka):
        host, _, port = address.rpartition(":")
        try:
            connection = await create_conn(host.strip("[]"), int(port), **options, on_close=on_close)
        except (OSError, KafkaError) as error:
            denied |= _is_denial(error)
            causes.append(f"{address}: {_cause(kafka, error)}")
        except ValueError:
            causes.append(f"{address}: write HOST:PORT")
        else:
            connection.close()
            return
        finally:
            # A TLS connection ends with an exchange, for which aiokafka does not wait after a refusal.
            if opened:
                await asyncio.wait({one.close() for one in opened}, timeout=CLOSE_S)
    if denied:
        raise AccessDenied(f"no Kafka broker accepts this client ({'; '.join(causes)})")
    raise BrokerUnavailable(
        f"no Kafka broker answers at {kafka.bootstrap} ({'; '.join(causes)}); start one there, or name another with "
        f"kafka.bootstrap (RELAYGR_KAFKA_BOOTSTRAP)"
    )


def _is_denial(error: BaseException) -> bool:
    # aiokafka raises a KafkaError for a refused SASL exchange, and a KafkaConnectionError for a lost connection.
    return isinstance(error, ssl.SSLError) or (
        isinstance(error, KafkaError) and not isinstance(error, KafkaConnectionError)
    )


def _cause(kafka: Kafka, error: BaseException) -> str:
    listener = f"is the listener one for {kafka.security_protocol} (`kafka.security_protocol`)?"
    cause = str(error) or type(error).__name__
    match error:
        case ssl.SSLCertVerificationError():
            cause = f"its certificate was not accepted: {error.verify_message}; {_mend(kafka, error.verify_code)}"
        case ssl.SSLError():
            cause = f"TLS failed: {error.reason}; {listener}"
        case TimeoutError():
            cause = f"no answer within {kafka.request_timeout_ms} ms; {listener}"
        case UnsupportedSaslMechanismError():
            cause = f"`kafka.sasl_mechanism` = {kafka.sasl_mechanism}: {cause}"
        case KafkaConnectionError() | ConnectionResetError() | BrokenPipeError():
            cause = f"it closed the connection; {listener} {_own(kafka)}"
        case KafkaError():
            cause = f"it refused user {kafka.sasl_username!r} by {kafka.sasl_mechanism}: {cause}"
    return cause


def _mend(kafka: Kafka, code: int) -> str:
    """What to do about a broker's certificate that fails OpenSSL's check of this number."""
    if code in _OF_TIME:
        return "renew it, or set the clock of this machine"
    if code in _OF_NAME:
        return "is it made out to that host? Name the broker in `kafka.bootstrap` as its certificate does"
    return f"is `tls.ca` ({kafka.tls_ca or 'the system’s'}) its authority?"


def _own(kafka: Kafka) -> str:
    """What else to ask where a broker says nothing: it may want a certificate, or not accept ours."""
    if not kafka.tls_certificate:
        return "Does it ask for a certificate (`tls.certificate`)?"
    from cryptography.x509 import load_pem_x509_certificate  # noqa: PLC0415  (a tenth of a second, for a message)

    own = load_pem_x509_certificate(read_bytes(kafka.tls_certificate))
    return (
        f"Does it accept `tls.certificate` = {kafka.tls_certificate}, by {own.issuer.rfc4514_string()}, valid until "
        f"{own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC?"
    )
