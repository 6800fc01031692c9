"""What an engine's directory tells the ranks of the engine about producers."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lifecycle.ticket import PeerKey, ProducerName


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedReply:
    """What an engine's side channel answered, as it came; untrusted.

    Attributes:
        address: the one that answered, one of ``PeerKey.addresses``.
        incarnation: the incarnation in the payload of rank 0.
        ranks: every rank's encoded payload, in rank order. Empty if the engine made none of the
            tickets for which it was asked.
        ticket_key: the public key that proves the engine's tickets; empty if they have no proofs.
        numeric: the IP address of the side channel.
        seconds: how long the handshake took.
    """

    address: PeerKey
    incarnation: Incarnation
    ranks: tuple[bytes, ...]
    ticket_key: bytes = b""
    numeric: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> ProducerName:
        """Return the name of the engine that answered."""
        return self.address.engine, self.incarnation, self.ticket_key

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all payloads."""
        return sum(map(len, self.ranks))


Outcome = tuple[PeerKey, EncodedReply | KVFerryError]
"""A producer that was asked, with its reply or the error."""
Gone = tuple[PeerKey, int, KVFerryError | None]
"""A producer as it was asked, its incarnation, and the error or ``None``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerNews:
    """What a directory tells the endpoints of all ranks in one step.

    Attributes:
        outcomes: the producers that have been asked. Those with payloads are watched from now on.
        gone: the producers, each with its incarnation, that are watched no more, and the error;
            ``None`` if no request used it. These come first.
        is_asking: whether the directory waits for a reply.
        is_quick: whether such a reply may come within milliseconds.
    """

    outcomes: tuple[Outcome, ...] = ()
    gone: tuple[Gone, ...] = ()
    is_asking: bool = False
    is_quick: bool = False

    def __bool__(self) -> bool:
        return bool(self.outcomes or self.gone)
