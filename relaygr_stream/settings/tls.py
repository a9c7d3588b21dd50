"""TLS of the connections that this process opens to brokers and to the history store.

The other end's certificate and its host name are checked; no setting turns that off. The hand-over between workers has
rules of its own (handover/certificates.py).
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.schema import History, Kafka

#: The fields of both sections that name files.
FILES: Final = ("tls_ca", "tls_certificate", "tls_key")


def setting_of(field: str) -> str:
    """The setting that a field has its value of: tls.ca of tls_ca."""
    return field.replace("_", ".", 1)


def client_context(section: Kafka | History) -> ssl.SSLContext:
    """The context of all connections of a section. It trusts tls.ca alone, or the system's authorities without one.

    Raises ConfigError for files that are missing or of no use.
    """
    for name in FILES:
        path = getattr(section, name)
        if path and not Path(path).is_file():
            raise ConfigError(f"`{setting_of(name)}` = {path!r}: no such file")
    try:
        context = ssl.create_default_context(cafile=section.tls_ca or None)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"`tls.ca` = {section.tls_ca!r}: not certificates in PEM form ({error})") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if section.tls_key and not section.tls_certificate:
        raise ConfigError("`tls.key` is set without `tls.certificate`; set both, or none")
    if section.tls_certificate:
        try:
            # A password in any case: without one, OpenSSL would ask the terminal.
            context.load_cert_chain(
                section.tls_certificate, section.tls_key or None, password=lambda: section.tls_key_password
            )
        except (ssl.SSLError, OSError, ValueError) as error:
            raise ConfigError(
                f"`tls.certificate` = {section.tls_certificate!r}, `tls.key` = {section.tls_key!r}: not a "
                f"certificate and its key in PEM form, or `tls.key_password` is not the key's ({error})"
            ) from error
    return context
