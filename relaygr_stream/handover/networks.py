"""Which addresses workers may have: others are neither connected to nor let in. Knows no sockets."""

from __future__ import annotations

import ipaddress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from relaygr_stream.errors import ConfigError


class Networks:
    """`handover.networks`: networks in CIDR form, separated by commas. Raises ConfigError for what is none."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._networks: list[IPv4Network | IPv6Network] = []
        for part in filter(None, (each.strip() for each in text.split(","))):
            try:
                self._networks.append(ipaddress.ip_network(part))
            except ValueError as error:
                raise ConfigError(
                    f"`handover.networks` = {text!r}: {error}; write networks such as 10.0.0.0/8, separated by commas"
                ) from error
        if not self._networks:
            raise ConfigError("`handover.networks` is empty: no worker could reach another; name their networks")

    def __str__(self) -> str:
        return self._text

    def __contains__(self, address: str) -> bool:
        """Whether this address, as sockets write it, is in one of them."""
        try:
            found = parsed(address)
        except ValueError:
            return False
        return any(found in network for network in self._networks)


def parsed(address: str) -> IPv4Address | IPv6Address:
    """The address, without a zone; an IPv4 one that comes mapped into IPv6 is what it is. Raises ValueError."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found
