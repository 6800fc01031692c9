"""Proofs of tickets: Ed25519 signatures with a key that an engine makes when it starts.

The handshake publishes the public key, so a ticket that was altered on its way is refused without
any configuration. A consumer learns the key from the engine that answers at the ticket's address: a
proof shows that this engine made the ticket, but not that the engine is one of yours.
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
"""Prefix of what is signed, so that the proof of a ticket is never a signature of anything else."""

ENCODE_ERRORS = (msgspec.MsgspecError, TypeError, ValueError, RecursionError, OverflowError)
"""All that msgspec's JSON encoder raises for an object that cannot be encoded."""

MAX_VERIFIED = 1 << 10
"""The most results that are cached: a ticket is verified when it comes and when it is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The proof that a ticket was made by the engine that the ticket names.

    Attributes:
        key: the public key that the ticket names, 32 bytes.
        content: the hash of the ticket's content, 32 bytes; computed by the engine that reads the
            ticket, not carried in it.
        signature: signature of the hash by the key, 64 bytes.

    Raises:
        TicketError: one of the three has another length.
    """

    key: bytes
    content: bytes
    signature: bytes

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

    The private key never leaves the process.

    Attributes:
        public: the public key, 32 bytes.

    Raises:
        SecretError: this build of ``cryptography`` has no Ed25519.
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
        """Return the signature of a ticket's content, 64 bytes.

        Args:
            said: the ticket's content, as for ``content_of``.

        Raises:
            TicketError: the content cannot be encoded as JSON.
        """
        return self._private.sign(CONTEXT + content_of(said))


def content_of(said: Mapping[str, object]) -> bytes:
    """Return the hash of a ticket's content, 32 bytes.

    Args:
        said: the content: text, integers, booleans, and lists and mappings of them. The order of
            the keys of a mapping does not matter.

    Raises:
        TicketError: the content cannot be encoded as JSON.
    """
    try:
        text = _canonical.encode(said)
    except ENCODE_ERRORS as exc:
        raise TicketError(f"what the ticket says cannot be proved: {exc}") from exc
    return hashlib.blake2b(text, digest_size=CONTENT_BYTES).digest()


_canonical = msgspec.json.Encoder(order="sorted")
"""Equal content gives equal text: sorted keys, no spaces. The json module, which ``signing`` uses,
takes many times as long for long lists of blocks."""


def check(proof: Proof | None, published: bytes) -> None:
    """Refuse a ticket whose proof does not fit the key in its engine's handshake.

    If the handshake has no key, only a ticket without a proof is accepted.

    Args:
        proof: the ticket's proof; ``None`` if the ticket has no proof.
        published: the public key in the engine's handshake; empty if the engine's build proves no
            tickets.

    Raises:
        TicketError: the ticket has no proof although its engine publishes a key, or has a proof
            although the engine publishes none, or names another key, or was altered.
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
    """Return the hash of an engine's public key, 16 bytes.

    Each rank of the engine keeps this fingerprint in registered memory. A peer reads it there to
    check that it has reached the memory of the engine that published the key.
    """
    return hashlib.blake2b(public, digest_size=FINGERPRINT_BYTES, person=b"kvferry ticket").digest()
