"""Which peers an engine admits to its side channel, and which it connects to."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvferry.core.errors import AdmissionError, SecretError
from kvferry.core.security.keys import KeyPair
from kvferry.core.security.networks import Networks


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Which peers an engine accepts, both as clients and as servers of a side channel.

    Attributes:
        own: this engine's keys. With ``None`` its side channel is unencrypted, and it connects only
            to unencrypted ones.
        peers: public keys of accepted peers; empty without ``own``. A ``PeerKeys`` can be replaced
            later, and counts from the next handshake or request on.
        networks: networks in which a peer's address must lie; ``None`` for any address.
        is_command: whether a ``kvferry`` command connects: errors then name its flags.

    Raises:
        SecretError: only one of ``own`` and ``peers`` is given.
    """

    own: KeyPair | None = None
    peers: AbstractSet[bytes] = frozenset()
    networks: Networks | None = None
    is_command: bool = False

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
