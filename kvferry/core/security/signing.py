"""Signatures of tickets: HMAC-SHA256 with a secret that producers and consumers share.

A ticket passes through a router and often a client. The signature is over everything that it says,
what a newer version says included, so that whoever carries it can neither alter nor add anything.
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
"""In front of what is signed: a secret that signs something else too is no oracle for tickets."""


@dataclass(frozen=True, slots=True)
class TicketSecrets:
    """The secrets that an engine signs with (the first), and those that it accepts (all).

    To replace one without refusing a ticket: add the new one as the second everywhere, then make
    it the first everywhere, then remove the old one.

    Raises:
        SecretError: there is none or too many, one is too short to be one, or stands twice.
    """

    secrets: tuple[bytes, ...] = field(repr=False)

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
        """From what files and the environment hold. Raises ``SecretError``."""
        return cls(tuple(text.encode("utf-8", "surrogateescape") for text in texts))

    def sign(self, said: Mapping[str, object]) -> bytes:
        """The signature of what a ticket says: 32 bytes.

        Args:
            said: text, integers, truth values, and lists and mappings of them; numbers must come
                back from JSON as they went.
        """
        return _mac(self.secrets[0], _canonical(said))

    def check(self, said: Mapping[str, object], signature: bytes) -> None:
        """Check what a ticket says against its signature; takes as long whichever secret fits.

        Raises:
            TicketError: it is not signed, or not over this with one of these secrets.
        """
        if not signature:
            raise TicketError(
                "the ticket is not signed, and this engine has ticket_secrets: give its engine the "
                "same ones",
                reason=TicketReason.SIGNATURE,
            )
        content = _canonical(said)
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
    """JSON with sorted keys, without spaces, in ASCII: one text for what is equal.

    Raises:
        TicketError: it cannot be written so, as nothing that came as JSON could be.
    """
    try:
        return json.dumps(said, sort_keys=True, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as exc:
        raise TicketError(f"what the ticket says cannot be signed: {exc}") from exc
