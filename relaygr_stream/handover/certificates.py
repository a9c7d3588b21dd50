"""Authentication between workers: TLS 1.3 with certificates on both sides, which name the worker and its host.

The certificates' authority comes from the fleet's secret or from files. From the secret, each worker derives the same
authority and issues itself a certificate for one day, in memory. A certificate names its worker in a URI, so a
certificate that the same authority issued for another purpose is not accepted.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import Any, Final

import structlog
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.inputs import no_password, read_bytes
from relaygr_stream.settings.worker import Handover
from relaygr_stream.telemetry.clocks import Clock
from relaygr_stream.wire.signature import purpose_key

#: The protocol's name, negotiated by TLS (ALPN). Version 1 had a seal on each frame instead of TLS, 2 copies in frames.
PROTOCOL: Final = "relaygr-handover/3"
PURPOSE: Final = "hand-over authority 1"
NAME_URI: Final = "relaygr://worker/"
#: The validity of a certificate: a leaked one is of no use after a day.
LIFETIME: Final = timedelta(days=1)
#: The largest difference between the clocks of two workers.
CLOCKS: Final = timedelta(hours=1)
#: Older contexts are renewed at their next use, with a new certificate or with the files' present contents.
RENEW_S: Final = 3600.0

Pem = bytes
_log = structlog.get_logger(__name__)


class Networks:
    """`handover.networks`: the networks that workers may have addresses in, in CIDR form.

    The worker neither connects to nor accepts other addresses. Raises ConfigError for a malformed or empty list.
    """

    def __init__(self, networks: Sequence[str]) -> None:
        self._text = ", ".join(networks)
        self._networks: list[IPv4Network | IPv6Network] = []
        for each in networks:
            try:
                self._networks.append(ipaddress.ip_network(each))
            except ValueError as error:
                raise ConfigError(
                    f"`handover.networks` = {self._text!r}: {error}; write networks such as 10.0.0.0/8"
                ) from error
        if not self._networks:
            raise ConfigError("`handover.networks` is empty: no worker could reach another; name the workers' networks")

    def __str__(self) -> str:
        return self._text

    def __contains__(self, address: str) -> bool:
        """Whether this address, in the form of the socket module, is in one of the networks."""
        try:
            found = parsed(address)
        except ValueError:
            return False
        return any(found in network for network in self._networks)


def parsed(address: str) -> IPv4Address | IPv6Address:
    """The address without its zone; an IPv4 address mapped into IPv6 becomes IPv4. Raises ValueError."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found


class Credentials:
    """TLS contexts for both ends. make: returns the accepted authorities' certificates, and ours with chain and key."""

    def __init__(self, make: Callable[[], tuple[Pem, Pem]], clock: Clock = time.monotonic) -> None:
        self._make = make
        self._clock = clock
        self._renew()

    def context(self, purpose: ssl.Purpose) -> ssl.SSLContext:
        """The context for connecting (SERVER_AUTH) or for accepting connections (CLIENT_AUTH)."""
        if self._clock() > self._made_s + RENEW_S:
            try:
                self._renew()
            except (OSError, ValueError) as error:
                _log.warning("certificates not renewed; the former ones stay in use", error=str(error))
        return self._contexts[purpose]

    def _renew(self) -> None:
        self._made_s = self._clock()
        authority, own = self._make()
        self._contexts = {
            purpose: _context(protocol, authority, own)
            for purpose, protocol in (
                (ssl.Purpose.SERVER_AUTH, ssl.PROTOCOL_TLS_CLIENT),
                (ssl.Purpose.CLIENT_AUTH, ssl.PROTOCOL_TLS_SERVER),
            )
        }


def make_credentials(settings: Handover, name: str, host: str) -> Credentials:
    """The credentials that the settings define. host: the host by which other workers reach this one.

    A secret takes a second of CPU, so call it in a thread. Raises ConfigError for files that are missing, hold no
    certificate, or do not name this worker and host.
    """
    if not settings.tls_certificate:
        keys = [
            Ed25519PrivateKey.from_private_bytes(purpose_key(secret, PURPOSE))
            for secret in (settings.secret, settings.accepted_secret)
            if secret
        ]
        authorities = [authority_of(key) for key in keys]
        accepted = b"".join(map(pem, authorities))
        return Credentials(lambda: (accepted, issue(authorities[0], keys[0], name, host)))
    try:
        return Credentials(lambda: _from_files(settings, name, host))
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"`handover.tls_ca` = {settings.tls_ca!r}, `handover.tls_certificate` = {settings.tls_certificate!r}, "
            f"`handover.tls_key` = {settings.tls_key!r}: {error}"
        ) from error


def identity_problem(certificate: Mapping[str, Any] | None, name: str, host: str) -> str:
    """Why this certificate (as returned by ssl) does not belong to the worker `name` at `host`; "" if it does.

    TLS has checked the authority before. The names distinguish one worker from another.
    """
    found = tuple((certificate or {}).get("subjectAltName", ()))
    if ("URI", NAME_URI + name) not in found:
        names = ", ".join(text for kind, text in found if kind == "URI") or "no worker"
        return f"its certificate names {names} and not {NAME_URI}{name}"
    if not any(_same_host(kind, text, host) for kind, text in found):
        hosts = ", ".join(text for kind, text in found if kind != "URI") or "no host"
        return f"its certificate is made out to {hosts} and not to {host}, which `worker-status` states"
    return ""


def worker_name(certificate: Mapping[str, Any] | None) -> str:
    """The worker that the certificate names; "" if it names none or several."""
    found = [text for kind, text in (certificate or {}).get("subjectAltName", ()) if kind == "URI"]
    return found[0].removeprefix(NAME_URI) if len(found) == 1 and found[0].startswith(NAME_URI) else ""


def _same_host(kind: str, text: str, host: str) -> bool:
    if kind == "DNS":
        return text.lower() == host.lower()
    try:
        return kind == "IP Address" and parsed(text.strip()) == parsed(host)
    except ValueError:
        return False


def _context(protocol: int, authority: Pem, own: Pem) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # identity_problem compares host and name, at both ends alike
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata=authority.decode("ascii"))
    _load(context, own)
    context.set_alpn_protocols([PROTOCOL])
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no resumption: each session authenticates itself
    return context


def _load(context: ssl.SSLContext, own: Pem) -> None:
    """Load certificate and key. OpenSSL reads keys from files only: an in-memory file on Linux, else a private one."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("certificate"), "wb") as memory:
            memory.write(own)
            memory.flush()
            context.load_cert_chain(f"/proc/self/fd/{memory.fileno()}", password=no_password)
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "certificate.pem"
            file.touch(mode=0o600)
            file.write_bytes(own)
            context.load_cert_chain(file, password=no_password)


# ---- from the secret ----


def authority_of(key: Ed25519PrivateKey) -> x509.Certificate:
    """The fleet's authority: the same bytes at every worker, since nothing in it is random or depends on the date."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "relaygr fleet")])
    public = key.public_key()
    return (
        x509.CertificateBuilder(subject, subject, public, 1, datetime(2020, 1, 1), datetime(2120, 1, 1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, None)
    )


def issue(authority: x509.Certificate, key: Ed25519PrivateKey, name: str, host: str) -> Pem:
    """A new key, and its certificate for one day."""
    own, now = Ed25519PrivateKey.generate(), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "relaygr worker")])
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issued = (
        x509.CertificateBuilder(authority.subject, subject, own.public_key(), x509.random_serial_number())
        .not_valid_before(now - CLOCKS)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(NAME_URI + name), _host_name(host)]),
            critical=False,
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, None)
    )
    return pem(issued) + own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host.partition("%")[0]))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(
            f"{host!r} cannot be named in a certificate ({error}); set handover.advertise to a host name or an address"
        ) from error


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(digital_signature, False, False, False, False, key_cert_sign, False, False, False)


def pem(certificate: x509.Certificate) -> Pem:
    """The certificate in PEM."""
    return certificate.public_bytes(Encoding.PEM)


# ---- from files ----


def _from_files(settings: Handover, name: str, host: str) -> tuple[Pem, Pem]:
    authority = read_bytes(settings.tls_ca)
    own = read_bytes(settings.tls_certificate)
    if settings.tls_key:
        own += b"\n" + read_bytes(settings.tls_key)
    leaf = x509.load_pem_x509_certificate(own)
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    kinds: dict[type, str] = {x509.UniformResourceIdentifier: "URI", x509.DNSName: "DNS", x509.IPAddress: "IP Address"}
    found = [(kinds[type(each)], str(each.value)) for each in names if type(each) in kinds]
    if problem := identity_problem({"subjectAltName": found}, name, host):
        raise ValueError(
            f"{problem}; let its subjectAltName have URI:{NAME_URI}{name} and the host by which other workers reach it"
        )
    return authority, own
