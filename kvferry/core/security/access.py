"""Which peers an engine admits to its side channel, and which it connects to."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvferry.core.errors import AdmissionError, SecretError
from kvferry.core.security.keys import KeyPair

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

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
        return self.this_host and is_here(str(address))

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


def is_here(numeric: str) -> bool:
    """Return whether a numeric address is one of this host's own; any other text is not."""
    try:
        address = ipaddress.ip_address(numeric)
    except ValueError:
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            # Sends no packet. Only an own address has itself as the kernel's source address.
            asking.connect((str(address), _DISCARD_PORT))
            return ipaddress.ip_address(asking.getsockname()[0]) == address
    except OSError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Which peers an engine accepts, both as clients and as servers of a side channel.

    A ``PeerKeys`` can be replaced later, and counts from the next handshake or request on. Raises
    ``SecretError`` if only one of ``own`` and ``peers`` is given.
    """

    # This engine's keys; with ``None``, its own side channel and those it asks are unencrypted.
    own: KeyPair | None = None
    peers: AbstractSet[bytes] = frozenset()  # public keys
    networks: Networks | None = None  # that have a peer's address; ``None`` for any address

    def __post_init__(self) -> None:
        if self.own is None and self.peers:
            raise SecretError(
                "curve_peers without curve_secret_key: their side channels would refuse an engine "
                "without keys. Let 'kvferry keygen' make some, or remove curve_peers"
            )
        if self.own is not None and not self.peers:
            raise SecretError(
                "curve_secret_key without curve_peers admits nobody: list the public keys of the "
                "engines to exchange pages with"
            )

    @property
    def public(self) -> bytes:
        """This engine's public key, which its tickets carry; empty if it has no keys."""
        return self.own.public if self.own is not None else b""

    @property
    def admits_anybody(self) -> bool:
        """Whether peers are admitted without a key and at every address."""
        return self.own is None and self.networks is None

    def check_server(self, key: bytes) -> None:
        """Check that this engine may connect to a side channel with this key; empty for no key.

        Raises ``AdmissionError`` if only one of both has keys, or ``key`` is not in ``peers``.
        """
        if self.own is None and key:
            raise AdmissionError(
                "its side channel is encrypted, and this engine has no keys: set curve_secret_key "
                "and curve_peers here"
            )
        if self.own is not None and not key:
            raise AdmissionError(
                "its tickets name no key, and this engine has keys: set curve_secret_key and "
                "curve_peers on that engine too"
            )
        if key and key not in self.peers:
            raise AdmissionError(
                f"its key is {key.hex()}, which is not listed here: add it to curve_peers, if it "
                "is one of yours"
            )

    def allows(self, numeric: str) -> bool:
        """Return whether peers at a numeric IP address, such as ``10.0.0.7``, are admitted."""
        return self.networks is None or numeric in self.networks


OPEN = Access()
"""Admit every peer at every address, unencrypted."""

NEARBY = Access(networks=Networks.nearby())
"""Admit every peer on this host and in private networks, unencrypted: an engine's default."""
