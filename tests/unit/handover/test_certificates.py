"""Certificates: who can make them, what they say, how long they are good for; and networks."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat
from hypothesis import assume, example, given
from hypothesis import strategies as st

from relaygr_stream.errors import ConfigError
from relaygr_stream.handover import certificates
from relaygr_stream.handover.build import hands_over
from relaygr_stream.handover.certificates import (
    NAME_URI,
    RENEW_S,
    Credentials,
    Networks,
    identity_problem,
    make_credentials,
    worker_name,
)
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.worker import Handover
from tests.unit.handover.peers import ALL, SECRET, peers
from tests.waiting import Clock, until

NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,128}", fullmatch=True)
HOSTS = st.one_of(
    st.ip_addresses().map(str), st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z]{2,5})?", fullmatch=True)
)


def as_ssl_tells(pem: bytes) -> dict[str, object]:
    names = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    kinds: dict[type, str] = {x509.DNSName: "DNS", x509.IPAddress: "IP Address", x509.UniformResourceIdentifier: "URI"}
    return {"subjectAltName": tuple((kinds[type(each)], str(each.value)) for each in names)}


def issued(name: str, host: str, key: Ed25519PrivateKey | None = None) -> tuple[bytes, bytes]:
    """An authority and a certificate by it."""
    key = key or Ed25519PrivateKey.generate()
    authority = certificates.authority_of(key)
    return certificates.pem(authority), certificates.issue(authority, key, name, host)


def address(host: str) -> object:
    """An IPv4 address is the same one where it is mapped into IPv6."""
    try:
        return certificates.parsed(host)
    except ValueError:
        return host


@given(NAMES, HOSTS, NAMES, HOSTS)
@example("w", "0.0.0.0", "w", "::ffff:0:0")
def test_a_certificate_is_good_for_its_worker_and_host_alone(name: str, host: str, other: str, there: str) -> None:
    found = as_ssl_tells(issued(name, host)[1])
    assert worker_name(found) == name
    assert identity_problem(found, name, host) == ""
    if other != name:
        assert f"not {NAME_URI}{other}" in identity_problem(found, other, host)
    if address(there) != address(host):
        assert f"not to {there}" in identity_problem(found, name, there)


def test_no_certificate_names_nobody() -> None:
    for nothing in (None, {}, {"subjectAltName": (("DNS", "w"),)}, {"subjectAltName": (("URI", "https://w"),)}):
        assert worker_name(nothing) == ""
        assert identity_problem(nothing, "w", "h")
    twice = {"subjectAltName": (("URI", f"{NAME_URI}a"), ("URI", f"{NAME_URI}b"))}
    assert worker_name(twice) == ""


def test_the_authority_is_the_same_at_every_worker_and_another_for_another_secret() -> None:
    def authorities(secret: str, worker: str) -> list[bytes]:
        credentials = make_credentials(Handover(secret=secret), worker, "h")
        return credentials.context(ssl.Purpose.SERVER_AUTH).get_ca_certs(binary_form=True)

    (one,), (same,) = authorities(SECRET, "w"), authorities(SECRET, "v")
    (other,) = authorities("another sixteen characters", "w")
    assert one == same != other


def test_a_certificate_lasts_a_day_and_its_key_is_new_each_time() -> None:
    first, second = (x509.load_pem_x509_certificate(issued("w", "h")[1]) for _ in range(2))
    now = datetime.now(UTC)
    assert first.not_valid_before_utc < now < first.not_valid_after_utc < now + timedelta(days=1, minutes=1)
    assert first.public_key() != second.public_key()


def test_contexts_are_made_anew_each_hour_and_stay_where_that_fails() -> None:
    clock, made, fails = Clock(0.0), list[int](), list[Exception]()

    def make() -> tuple[bytes, bytes]:
        if fails:
            raise fails[0]
        made.append(1)
        return issued("w", "h")

    credentials = Credentials(make, clock)
    purpose = ssl.Purpose.SERVER_AUTH
    first = credentials.context(purpose)
    clock.now = RENEW_S - 1
    assert credentials.context(purpose) is first
    clock.now = RENEW_S + 1
    second = credentials.context(purpose)
    assert second is not first
    clock.now += RENEW_S + 1
    fails.append(OSError("half a file"))
    assert credentials.context(purpose) is second
    assert len(made) == 2


# ---- files in place of the secret ----


@pytest.fixture
def files(tmp_path: Path) -> Callable[[str, Ed25519PrivateKey], Handover]:
    """Settings of a worker with files by this authority, as an administrator would make them."""

    def make(name: str, key: Ed25519PrivateKey) -> Handover:
        authority, own = issued(name, "127.0.0.1", key)
        certificate, marker, private = own.partition(b"-----BEGIN PRIVATE KEY")
        for kind, pem in (("ca", authority), ("certificate", certificate), ("key", marker + private)):
            (tmp_path / f"{name}-{kind}.pem").write_bytes(pem)
        paths = {f"tls_{kind}": str(tmp_path / f"{name}-{kind}.pem") for kind in ("ca", "certificate", "key")}
        return Handover(**paths)  # type: ignore[arg-type]

    return make


async def test_configured_files_serve_in_place_of_the_secret(
    files: Callable[[str, Ed25519PrivateKey], Handover],
) -> None:
    key = Ed25519PrivateKey.generate()
    async with peers(first={"settings": files("old", key)}, settings=files("new", key)) as (_, new):
        new.handover.lanes_changed(ALL, ())
        await until(lambda: new.total("entries", way="taken") == 6)


def test_files_that_do_not_name_this_worker_are_refused_and_what_to_issue_is_said(
    files: Callable[[str, Ed25519PrivateKey], Handover], tmp_path: Path
) -> None:
    settings = files("w1", Ed25519PrivateKey.generate())
    with pytest.raises(ConfigError, match=r"subjectAltName have URI:relaygr://worker/w2"):
        make_credentials(settings, "w2", "127.0.0.1")
    with pytest.raises(ConfigError, match=r"made out to 127\.0\.0\.1 and not to pod-7"):
        make_credentials(settings, "w1", "pod-7")
    (tmp_path / "w1-key.pem").unlink()
    with pytest.raises(ConfigError, match=r"handover\.tls_key.*No such file"):
        make_credentials(settings, "w1", "127.0.0.1")
    (tmp_path / "w1-key.pem").write_text("nonsense")
    with pytest.raises(ConfigError, match=r"handover\.tls_certificate"):
        make_credentials(settings, "w1", "127.0.0.1")


def test_a_key_with_a_password_is_refused_in_words_and_asked_for_nowhere(
    files: Callable[[str, Ed25519PrivateKey], Handover], tmp_path: Path
) -> None:
    settings = files("w1", Ed25519PrivateKey.generate())
    encrypted = Ed25519PrivateKey.generate().private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")
    )
    (tmp_path / "w1-key.pem").write_bytes(encrypted)
    with pytest.raises(ConfigError, match=r"handover\.tls_key.*has a password.*openssl pkey"):
        make_credentials(settings, "w1", "127.0.0.1")


def test_a_part_of_the_files_is_refused() -> None:
    assert not hands_over(Settings())
    assert hands_over(Settings(handover=Handover(secret=SECRET)))
    assert hands_over(Settings(handover=Handover(tls_ca="a", tls_certificate="b")))
    for name in ("tls_ca", "tls_certificate", "tls_key"):
        with pytest.raises(ConfigError, match=f"handover.{name}"):
            hands_over(Settings(handover=Handover(**{name: "x"})))  # type: ignore[arg-type]


# ---- networks ----


@given(st.ip_addresses(), st.integers(0, 32))
def test_an_address_is_in_its_own_networks(address: ipaddress.IPv4Address | ipaddress.IPv6Address, bits: int) -> None:
    assume(getattr(address, "ipv4_mapped", None) is None)  # is an IPv4 address
    assert str(address) in Networks(["192.0.2.0/24", str(ipaddress.ip_network((address, bits), strict=False))])


@pytest.mark.parametrize(
    ("address", "inside"),
    [
        ("10.1.2.3", True),
        ("11.1.2.3", False),
        ("::ffff:10.1.2.3", True),
        ("::ffff:11.1.2.3", False),
        ("fe80::1%eth0", False),
        ("169.254.169.254", False),
        ("nonsense", False),
        ("", False),
    ],
)
def test_the_default_networks_are_private(address: str, inside: bool) -> None:
    assert (address in Networks(Handover().networks)) == inside


@pytest.mark.parametrize("networks", [[], [""], ["10.0.0.1/8"], ["10.0.0.0/33"], ["10.0.0.0/8", "example.org"]])
def test_what_is_no_network_is_refused(networks: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"handover\.networks"):
        Networks(networks)
