"""Signatures of tickets: HMAC-SHA256 with a secret that producers and consumers share.

A ticket passes through a router and often a client. The signature covers all its content, also
entries that only newer versions of kvferry know, so that nothing can be altered or added there.
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

    To replace a secret without refusing a ticket: add the new secret as the second everywhere, then
    make it the first everywhere, then remove the old secret. Any thread may call the methods.

    Attributes:
        secrets: the secrets, 1 to ``MAX_SECRETS``; only ``replace`` changes them.

    Raises:
        SecretError: there is no secret, there are too many, or a secret is too short or occurs
            twice.
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
        """Return the ticket secrets of an engine, from the texts in files or the environment.

        Args:
            texts: one secret or several each, a line for a secret; empty lines are skipped. The
                engine signs with the first.

        Raises:
            SecretError: as the class.
        """
        lines = (line.strip() for text in texts for line in text.split("\n"))
        return cls(tuple(line.encode("utf-8", "surrogateescape") for line in lines if line))

    def replace(self, newer: TicketSecrets) -> None:
        """Sign and check with the secrets of ``newer`` from now on."""
        self.secrets = newer.secrets

    def sign(self, said: Mapping[str, object]) -> bytes:
        """Return the signature of a ticket's content by the first secret, 32 bytes.

        Args:
            said: the content: text, integers, booleans, and lists and mappings of them.

        Raises:
            TicketError: the content cannot be encoded as JSON.
        """
        return _mac(self.secrets[0], _canonical(said))

    def check(self, said: Mapping[str, object], signature: bytes) -> None:
        """Refuse a ticket whose signature fits none of the secrets.

        The time that the check takes does not depend on which secret fits.

        Args:
            said: the ticket's content, as for ``sign``.
            signature: the ticket's signature; empty if the ticket has none.

        Raises:
            TicketError: the signature is missing or fits none of the secrets, or the content cannot
                be encoded as JSON.
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
    """Return a ticket's content as JSON with sorted keys, without spaces, in ASCII.

    Equal content gives equal bytes.

    Raises:
        TicketError: the content cannot be encoded as JSON.
    """
    try:
        return json.dumps(said, sort_keys=True, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as exc:
        raise TicketError(f"what the ticket says cannot be signed: {exc}") from exc
