"""The producer that a ticket names, and its address: what a handshake is asked for by."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.core.lifecycle.ticket import Ticket


class PeerKey(NamedTuple):
    """The producer that a ticket names, and its address; identifies a handshake.

    Attributes:
        host, port: address of the producer's side channel.
        key: public key that encrypts the side channel; empty without encryption.
        routed: a second (host, port), to ask if the first does not answer; ``None`` without.
        ticket_key: the public key that proves the ticket; empty if the ticket has no proof.
    """

    # With both keys, so that failed handshakes for a forged ticket do not delay a genuine one.
    engine: str
    host: str
    port: int
    key: bytes = b""
    routed: tuple[str, int] | None = None
    ticket_key: bytes = b""

    @property
    def places(self) -> tuple[PeerKey, ...]:
        """Return the addresses to ask, in order, each as a ``PeerKey`` without ``routed``."""
        if self.routed is None:
            return (self,)
        host, port = self.routed
        return self._replace(routed=None), self._replace(host=host, port=port, routed=None)

    @classmethod
    def of(cls, ticket: Ticket) -> PeerKey:
        """Return the producer that a ticket names."""
        return cls(
            ticket.engine,
            ticket.host,
            ticket.port,
            ticket.key,
            routed=ticket.routed,
            ticket_key=ticket.ticket_key,
        )
