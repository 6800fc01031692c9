"""What an engine's directory tells the ranks of the engine about producers."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lifecycle.ticket import PeerKey, ProducerName


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedReply:
    """What an engine's side channel answered, as it came; untrusted."""

    address: PeerKey  # the one that answered, one of ``PeerKey.addresses``
    incarnation: Incarnation  # in the payload of rank 0
    # Every rank's encoded payload; none if the engine that answered made none of the tickets for
    # which it was asked: then it only tells ranks to refuse these.
    ranks: tuple[bytes, ...]
    ticket_key: bytes = b""  # the public key that proves the engine's tickets
    numeric: str = ""  # the IP address of the side channel
    seconds: float = 0.0  # that the handshake took

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
"""A producer as it was asked, its incarnation, and the error; ``None`` if no request used it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerNews:
    """What a directory tells the endpoints of all ranks in one step; ``gone`` comes first."""

    outcomes: tuple[Outcome, ...] = ()  # producers with payloads are watched from now on
    gone: tuple[Gone, ...] = ()  # producers that are watched no more
    is_asking: bool = False  # whether the directory waits for a reply
    is_quick: bool = False  # whether such a reply may come within milliseconds

    def __bool__(self) -> bool:
        return bool(self.outcomes or self.gone)
