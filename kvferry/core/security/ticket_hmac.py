"""Signatures of tickets: HMAC-SHA256 with a secret that producers and consumers share.

A signature covers all of a ticket, also entries that only newer versions of kvferry know, so that
no router or client can alter or add anything.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.core.errors import SecretError, TicketError, TicketReason

MIN_SECRET_BYTES = 16
MAX_SECRETS = 8
CONTEXT = b"kvferry ticket\0"
"""Prefix of what is signed, so that other signatures with the same secret fit no ticket."""


@dataclass(slots=True)
class TicketSecrets:
    """The ticket secrets of an engine: it signs with the first, and accepts signatures with any.

    Thread-safe. Raises ``SecretError`` for no secret, too many, or one that is too short or occurs
    twice.
    """

    secrets: tuple[bytes, ...] = field(repr=False)  # changed by ``replace`` only

    def __post_init__(self) -> None:
        if not 1 <= len(self.secrets) <= MAX_SECRETS:
            raise SecretError(f"{len(self.secrets)} ticket secrets; 1 to {MAX_SECRETS} are allowed")
        for index, secret in enumerate(self.secrets):
            if len(secret) < MIN_SECRET_BYTES:
                raise SecretError(
                    f"ticket secret {index + 1} has {len(secret)} bytes; {MIN_SECRET_BYTES} is the "
                    "least: let 'kvferry keygen' make one"
                )
        if len(set(self.secrets)) != len(self.secrets):
            raise SecretError("a ticket secret stands twice: remove one of the two")

    @classmethod
    def of(cls, texts: Sequence[str]) -> TicketSecrets:
        """Return the secrets in texts, one per line; the engine signs with the first."""
        lines = (line.strip() for text in texts for line in text.split("\n"))
        return cls(tuple(line.encode("utf-8", "surrogateescape") for line in lines if line))

    def replace(self, newer: TicketSecrets) -> str:
        """Sign and check with the secrets of ``newer`` from now on; return the change, to log."""
        signer = "the same one as" if newer.secrets[0] == self.secrets[0] else "another one than"
        self.secrets = newer.secrets
        return f"{len(newer.secrets)} secret(s), and tickets are signed with {signer} before"

    def sign(self, said: Mapping[str, object]) -> bytes:
        """Return the signature of a ticket's content by the first secret, 32 bytes.

        Raises ``TicketError`` if the content cannot be encoded as JSON.
        """
        return _mac(self.secrets[0], _canonical(said))

    def check(self, said: Mapping[str, object], signature: bytes) -> None:
        """Refuse (``TicketError``) a signature, empty for none, that fits none of the secrets."""
        if not signature:
            raise TicketError(
                "the ticket is not signed, and this engine has ticket_secrets: give its engine the "
                "same ones",
                reason=TicketReason.SIGNATURE,
            )
        content = _canonical(said)
        # All are compared: the time must not tell which secret fits.
        fits = [hmac.compare_digest(_mac(secret, content), signature) for secret in self.secrets]
        if not any(fits):
            raise TicketError(
                "the ticket's signature does not fit: it was altered or made up on its way, or its "
                f"engine signs with none of the {len(fits)} ticket_secrets of this one",
                reason=TicketReason.SIGNATURE,
            )


def _mac(secret: bytes, content: bytes) -> bytes:
    return hmac.new(secret, CONTEXT + content, hashlib.sha256).digest()


def _canonical(said: Mapping[str, object]) -> bytes:
    """Return a ticket's content as JSON, in ASCII: equal content gives equal bytes."""
    try:
        return json.dumps(said, sort_keys=True, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as exc:
        raise TicketError(f"what the ticket says cannot be signed: {exc}") from exc
