"""Why no broker can be used: asked when a process starts, because aiokafka keeps the cause to its own log.

Knows nothing of topics.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final

from aiokafka.conn import AIOKafkaConnection, create_conn
from aiokafka.errors import KafkaConnectionError, KafkaError, UnsupportedSaslMechanismError

from relaygr_stream.bus.aiokafka_compat import CLOSE_S, bootstrap_addresses, client_options
from relaygr_stream.errors import AccessDenied, BrokerUnavailable
from relaygr_stream.settings.schema import Kafka

#: Options of `client_options` that a single connection takes.
_OF_A_CONNECTION: Final = (
    "client_id", "request_timeout_ms", "ssl_context", "security_protocol",
    "sasl_mechanism", "sasl_plain_username", "sasl_plain_password",
)  # fmt: skip


async def check_connection(kafka: Kafka) -> None:
    """Return if one of the bootstrap addresses lets us in.

    Raises AccessDenied where credentials or certificates are the cause, else BrokerUnavailable, with what each address
    said; ConfigError for settings that clash.
    """
    options = client_options(kafka, "relaygr-probe")
    options = {name: options[name] for name in _OF_A_CONNECTION if name in options}
    denied, said = False, []
    opened: list[AIOKafkaConnection] = []  # and closed again, by aiokafka or by us

    def on_close(connection: AIOKafkaConnection, _: object) -> None:
        opened.append(connection)

    for address in bootstrap_addresses(kafka):
        host, _, port = address.rpartition(":")
        try:
            connection = await create_conn(host.strip("[]"), int(port), **options, on_close=on_close)
        except (OSError, KafkaError) as error:
            denied |= _is_denial(error)
            said.append(f"{address}: {_cause(kafka, error)}")
        except ValueError:
            said.append(f"{address}: write HOST:PORT")
        else:
            connection.close()
            return
        finally:
            # Over TLS the broker has a farewell to say, which aiokafka does not wait for where it was refused.
            if opened:
                await asyncio.wait({one.close() for one in opened}, timeout=CLOSE_S)
    if denied:
        raise AccessDenied(f"no Kafka broker lets us in ({'; '.join(said)})")
    raise BrokerUnavailable(
        f"no Kafka broker answers at {kafka.bootstrap} ({'; '.join(said)}); start one there, or name another with "
        f"kafka.bootstrap (RELAYGR_KAFKA_BOOTSTRAP)"
    )


def _is_denial(error: BaseException) -> bool:
    # aiokafka turns every refusal of a SASL exchange into an error of Kafka's; a mere loss of the connection is a
    # KafkaConnectionError.
    return isinstance(error, ssl.SSLError) or (
        isinstance(error, KafkaError) and not isinstance(error, KafkaConnectionError)
    )


def _cause(kafka: Kafka, error: BaseException) -> str:
    listener = f"is the listener one for {kafka.security_protocol} (`kafka.security_protocol`)?"
    said = str(error) or type(error).__name__
    match error:
        case ssl.SSLCertVerificationError():
            said = (
                f"its certificate was not accepted: {error.verify_message}; is `kafka.tls_ca` "
                f"({kafka.tls_ca or 'the system’s'}) its authority, and is it made out to that host?"
            )
        case ssl.SSLError():
            said = f"TLS failed: {error.reason}; {listener}"
        case TimeoutError():
            said = f"no answer within {kafka.request_timeout_ms} ms; {listener}"
        case UnsupportedSaslMechanismError():
            said = f"`kafka.sasl_mechanism` = {kafka.sasl_mechanism}: {said}"
        case KafkaConnectionError():
            said = f"it closed the connection; {listener} does it ask for a certificate (`kafka.tls_certificate`)?"
        case KafkaError():
            said = f"it refused user {kafka.sasl_username!r} by {kafka.sasl_mechanism}: {said}"
    return said
