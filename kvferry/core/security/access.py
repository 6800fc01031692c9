"""Who is admitted to an engine's side channel, and to whom it connects."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.errors import AdmissionError, SecretError
from kvferry.core.security.keys import KeyPair
from kvferry.core.security.networks import Networks


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What an engine demands of its peers, whoever of the two connects.

    Attributes:
        own: this engine's keys; without them its side channel is open, and only it connects to
            open ones.
        peers: public keys of the engines that are admitted.
        networks: where they may be; ``None`` is anywhere.
        is_command: a command asks, and errors name its flags instead of an engine's settings.

    Raises:
        SecretError: there are keys and no peers, or peers and no keys.
    """

    own: KeyPair | None = None
    peers: frozenset[bytes] = frozenset()
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
        """What tickets say of this engine's keys; empty without any."""
        return self.own.public if self.own is not None else b""

    def check_server(self, key: bytes) -> None:
        """Whether this engine may ask a side channel, from the public key that it should have.

        Raises:
            AdmissionError: only one of the two has keys, or its key is not listed here.
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
        """Whether a peer may have this numeric address."""
        return self.networks is None or numeric in self.networks


OPEN = Access()
"""Everybody, everywhere, in the clear."""

NEARBY = Access(networks=Networks.nearby())
"""Everybody on this host and in private networks, in the clear: what an engine has by default."""
