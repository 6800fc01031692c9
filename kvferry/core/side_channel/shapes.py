"""Shapes of engines by their digests, so that a handshake need not send what the asker knows.

A rank's payload ends with its groups and fields, which engines of a deployment share (ADR 14).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.errors import HandshakeError
from kvferry.core.messages import shape_of
from kvferry.core.side_channel_messages import (
    MAX_REPLY_BYTES,
    SHAPE_DIGEST_BYTES,
    PayloadHeads,
    Payloads,
)

PERSON = b"kvferry shape"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """An engine's groups and fields: the end (``shape_of``) of each rank's payload, in rank order.

    The digest is BLAKE2b (32 bytes) over each end's length, as 8 bytes little-endian, and the end.
    """

    digest: bytes
    ends: tuple[bytes, ...]

    @classmethod
    def of(cls, payloads: Sequence[bytes]) -> EngineShape | None:
        """Return the shape of an engine; ``None`` if a payload does not end with its fields.

        Raises ``WireError`` if a payload is too long or malformed.
        """
        ends = tuple(map(shape_of, payloads))
        if not all(ends):
            return None
        hashed = hashlib.blake2b(digest_size=SHAPE_DIGEST_BYTES, person=PERSON)
        for end in ends:
            hashed.update(len(end).to_bytes(8, "little"))
            hashed.update(end)
        return cls(digest=hashed.digest(), ends=ends)

    def heads(self, payloads: Payloads) -> PayloadHeads:
        """Return the payloads of an engine of this shape without their ends."""
        ranks = [
            data[: len(data) - len(end)]
            for data, end in zip(payloads.ranks, self.ends, strict=True)
        ]
        return PayloadHeads(shape=self.digest, ranks=ranks, ticket_key=payloads.ticket_key)

    def whole(self, heads: PayloadHeads) -> list[bytes]:
        """Return the whole payloads for an answer of as many ranks, as untrusted as the answer.

        Raises ``HandshakeError`` if the payloads would be longer than a whole reply may be.
        """
        nbytes = sum(map(len, heads.ranks)) + sum(map(len, self.ends))
        if nbytes > MAX_REPLY_BYTES:
            raise HandshakeError(
                f"all ranks' payloads take {nbytes} bytes; {MAX_REPLY_BYTES} are allowed: use "
                "fewer ranks per engine, or describe each rank's memory with fewer fields"
            )
        return [head + end for head, end in zip(heads.ranks, self.ends, strict=True)]
