"""The networks in which an engine's peers may be."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.core.errors import SecretError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

PRIVATE = (
    *("127.0.0.0/8", "::1/128"),  # this host
    *("169.254.0.0/16", "fe80::/10"),  # one link
    *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),  # RFC 1918
    "100.64.0.0/10",  # RFC 6598, shared address space
    "fc00::/7",  # RFC 4193, unique local addresses
)
"""Networks that the internet does not route to."""

_DISCARD_PORT = 9


@dataclass(frozen=True, slots=True)
class Networks:
    """Networks, at least one, that peers may be in; ``this_host`` allows this host's own, too."""

    networks: tuple[Network, ...]
    this_host: bool = False

    def __post_init__(self) -> None:
        if not self.networks:
            raise SecretError(
                "allowed_peers is empty, so no peer could have an allowed address: list networks, "
                "such as 10.0.0.0/8, or set it to 'anywhere' to allow every address"
            )

    @classmethod
    def of(cls, texts: Iterable[str]) -> Networks:
        """Return the networks in texts such as ``10.0.0.0/8`` or ``fd00::7``.

        Raises ``SecretError`` for other texts, for bits set behind a prefix, and for no text.
        """
        return cls(tuple(map(_network, texts)))

    @classmethod
    def nearby(cls) -> Networks:
        """Return the networks that are allowed by default: this host and all private networks."""
        return cls(tuple(map(_network, PRIVATE)), this_host=True)

    def __contains__(self, numeric: str) -> bool:
        """Return whether a numeric address is allowed; any other text is not."""
        try:
            address = ipaddress.ip_address(numeric)
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        if any(address in network for network in self.networks):
            return True
        return self.this_host and _is_here(address)

    def __str__(self) -> str:
        if self == Networks.nearby():
            return "this host and private networks"
        return ", ".join(map(str, self.networks))


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as exc:
        raise SecretError(
            f"{text!r} in allowed_peers is no network ({exc}): write one as 10.0.0.0/8 or "
            "fd00::/8, or an address; names are not resolved here, and 'anywhere' stands alone, "
            "not in a list"
        ) from exc


def _is_here(address: Address) -> bool:
    """Return whether an address is one of this host's own addresses."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            # Sends no packet. Only an own address has itself as the kernel's source address.
            asking.connect((str(address), _DISCARD_PORT))
            return ipaddress.ip_address(asking.getsockname()[0]) == address
    except OSError:
        return False
