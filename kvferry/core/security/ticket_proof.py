"""Proofs of tickets: Ed25519 signatures with a key that an engine makes when it starts.

The handshake publishes the public key, so a ticket that was altered on its way is refused without
any configuration. A proof shows that the engine that answers at the ticket's address made the
ticket, but not that the engine is one of yours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from kvferry.core.errors import SecretError, TicketError, TicketReason

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

TICKET_KEY_BYTES = 32
PROOF_BYTES = 64
CONTENT_BYTES = 32
FINGERPRINT_BYTES = 16
CONTEXT = b"kvferry ticket proof\0"
"""Prefix of what is signed, so that a ticket's proof is never a signature of anything else."""

ENCODE_ERRORS = (msgspec.MsgspecError, TypeError, ValueError, RecursionError, OverflowError)
"""All that msgspec's JSON encoder raises for an object that cannot be encoded."""

MAX_VERIFIED = 1 << 10
"""The most results that are cached: a ticket is verified when it comes and when it is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The proof that a ticket was made by the engine that it names; checks the three lengths."""

    key: bytes  # the public key that the ticket names
    content: bytes  # a hash of the ticket's content, which its reader computes
    signature: bytes  # of the hash by the key

    def __post_init__(self) -> None:
        for name, value, size in (
            ("ticket_key", self.key, TICKET_KEY_BYTES),
            ("content", self.content, CONTENT_BYTES),
            ("proof", self.signature, PROOF_BYTES),
        ):
            if len(value) != size:
                raise TicketError(
                    f"the ticket's {name} has {len(value)} bytes; it has {size} where its engine "
                    "proves its tickets",
                    reason=TicketReason.PROOF,
                )


class TicketKey:
    """The key pair with which an engine proves its tickets, made anew at each start.

    The private key never leaves the process. Raises ``SecretError`` without Ed25519.
    """

    def __init__(self) -> None:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        try:
            self._private: Ed25519PrivateKey = Ed25519PrivateKey.generate()
        except UnsupportedAlgorithm as exc:
            raise SecretError(
                f"tickets cannot be signed, for cryptography has no Ed25519 here ({exc}): install "
                "cryptography's own wheel"
            ) from exc
        self.public = self._private.public_key().public_bytes_raw()

    def sign(self, said: Mapping[str, object]) -> bytes:
        """Return the signature of a ticket's content, 64 bytes; see ``content_of``."""
        return self._private.sign(CONTEXT + content_of(said))


def content_of(said: Mapping[str, object]) -> bytes:
    """Return the hash of a ticket's content, 32 bytes, whatever the order of a mapping's keys.

    Raises ``TicketError`` if the content cannot be encoded as JSON.
    """
    try:
        text = _canonical.encode(said)
    except ENCODE_ERRORS as exc:
        raise TicketError(f"what the ticket says cannot be proved: {exc}") from exc
    return hashlib.blake2b(text, digest_size=CONTENT_BYTES).digest()


_canonical = msgspec.json.Encoder(order="sorted")
"""Equal content gives equal text; many times as fast as ``json`` for long lists of blocks."""


def check(proof: Proof | None, published: bytes) -> None:
    """Raise ``TicketError`` for a ticket whose proof does not fit the key of the handshake.

    Where ``published`` is empty, as an older build's, only a ticket without a proof is accepted.
    """
    if proof is None and not published:
        return
    if proof is None:
        why = "it carries no proof, and its engine proves every ticket: the proof was taken away"
    elif not published:
        why = "it names a key of tickets, and its engine publishes none: it was made up"
    elif proof.key != published:
        why = "it names another key than its engine publishes: somebody else made it up"
    elif not verify(proof):
        why = "its proof does not fit: it was altered on its way"
    else:
        return
    raise TicketError(f"the ticket is refused: {why}", reason=TicketReason.PROOF)


@lru_cache(MAX_VERIFIED)
def verify(proof: Proof) -> bool:
    """Return whether the signature in a proof fits the proof's key and content."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        public = Ed25519PublicKey.from_public_bytes(proof.key)
        public.verify(proof.signature, CONTEXT + proof.content)
    except (InvalidSignature, ValueError):  # bytes that are no key
        return False
    return True


def load_library() -> None:
    """Import ``cryptography`` now, so that the first ticket does not wait for the import."""
    import cryptography.hazmat.primitives.asymmetric.ed25519  # noqa: F401


def fingerprint(public: bytes) -> bytes:
    """Return the hash of an engine's public key, 16 bytes, which its ranks' memory contains."""
    return hashlib.blake2b(public, digest_size=FINGERPRINT_BYTES, person=b"kvferry ticket").digest()
