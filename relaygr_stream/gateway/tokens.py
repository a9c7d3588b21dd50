"""Bearer tokens: whose requests these are."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Final

from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.schema import Gateway
from relaygr_stream.settings.section import LABEL

#: Characters that a token has at least: 96 bits in base64.
MIN_TOKEN: Final = 16
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")  # what arrives in a header as it was written
_LOCAL: Final = ("127.0.0.1", "::1", "localhost")


class RequestRefused(Exception):
    """A request that does not reach the relay. close: its body was not read, so the connection cannot go on."""

    def __init__(
        self, status: int, error: str, detail: str, headers: dict[str, str] | None = None, *, close: bool = True
    ) -> None:
        super().__init__(detail)
        self.status, self.error, self.detail = status, error, detail
        self.headers = {**(headers or {}), **({"connection": "close"} if close else {})}


class TenantTokens:
    """Whose requests these are. Raises ConfigError for malformed tokens, and for an open host without any."""

    def __init__(self, settings: Gateway) -> None:
        self._tenants: dict[bytes, str] = {}
        for number, entry in enumerate(settings.tokens.replace(",", " ").split(), 1):
            tenant, separator, token = entry.rpartition(":")
            if not separator or len(token) < MIN_TOKEN or not _TOKEN.fullmatch(token):
                raise ConfigError(
                    f"gateway.tokens: entry {number} is not TENANT:TOKEN with a token of {MIN_TOKEN} printable ASCII "
                    f"characters or more"
                )
            if ":" in tenant:
                raise ConfigError(
                    f"gateway.tokens: entry {number} has more than one colon, so where its token begins is open: "
                    f"neither tenant nor token may have one"
                )
            if not tenant:
                raise ConfigError(
                    f"gateway.tokens: entry {number} names no tenant before its colon; for requests of client.tenant "
                    f"alone, leave gateway.tokens empty"
                )
            if not re.search(LABEL.pattern or "", tenant) or len(tenant) > (LABEL.max_length or 0):
                raise ConfigError(
                    f"gateway.tokens: the tenant of entry {number} has more than {LABEL.max_length} characters, or "
                    f"control characters"
                )
            if self._tenants.setdefault(_digest(token), tenant) != tenant:
                raise ConfigError(f"gateway.tokens: entry {number} has the token of another tenant")
        if not self._tenants and settings.host not in _LOCAL:
            raise ConfigError(
                f"gateway.host {settings.host} is open to other machines, and gateway.tokens is empty: set tokens, "
                f"best in a file that RELAYGR_GATEWAY_TOKENS_FILE names"
            )

    def tenant(self, authorization: str, *, browser: bool = False) -> str:
        """The tenant of a request with this header. browser: its password prompt is accepted, too. Raises Refused."""
        tenant = self.known(authorization, browser=browser)
        if tenant is None:
            challenge = "Basic" if browser else "Bearer"
            headers = {"www-authenticate": f'{challenge} realm="relaygr"'}
            raise RequestRefused(401, "unauthorized", "no valid bearer token", headers)
        return tenant

    def known(self, authorization: str, *, browser: bool = True) -> str | None:
        """As `tenant`; None: a stranger."""
        if not self._tenants:
            return ""
        scheme, _, value = authorization.partition(" ")
        token = value.strip()
        if scheme.lower() == "basic" and browser:
            try:
                token = base64.b64decode(token, validate=True).decode().partition(":")[2]
            except ValueError:  # no base64, or no UTF-8 in it
                token = ""
        elif scheme.lower() != "bearer":
            token = ""
        return self._tenants.get(_digest(token))  # of its hash: the time of the look-up tells nothing of a token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
