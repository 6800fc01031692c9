"""Which addresses peers may have."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.core.errors import SecretError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Networks:
    """A list of networks; an address is allowed if one of them has it.

    Raises:
        SecretError: the list is empty, and so would allow nobody.
    """

    networks: tuple[Network, ...]

    def __post_init__(self) -> None:
        if not self.networks:
            raise SecretError(
                "allowed_peers is empty, so no peer could have an allowed address: list networks, "
                "such as 10.0.0.0/8, or leave it out to allow every address"
            )

    @classmethod
    def of(cls, texts: Iterable[str]) -> Networks:
        """From CIDR notation (``10.0.0.0/8``); an address alone is a network of one.

        Raises:
            SecretError: one is none, or has bits behind its prefix; names it.
        """
        return cls(tuple(map(_network, texts)))

    def __contains__(self, numeric: str) -> bool:
        """Whether a numeric address is allowed; one that is none is not."""
        try:
            address = ipaddress.ip_address(numeric)
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        return any(address in network for network in self.networks)

    def __str__(self) -> str:
        return ", ".join(map(str, self.networks))


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as exc:
        raise SecretError(
            f"{text!r} in allowed_peers is no network ({exc}): write one as 10.0.0.0/8 or "
            "fd00::/8, or an address; names are not resolved here"
        ) from exc
