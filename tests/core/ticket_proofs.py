"""Tickets with proofs, and tickets that were altered after they were proved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.security import Proof, TicketKey
from kvferry.core.security.proof import content_of


def said(ticket: Ticket) -> dict[str, Any]:
    """Return the part of a ticket that its proof covers."""
    return {**msgspec.to_builtins(ticket), "proof": None, "routed": None}


def proved(ticket: Ticket, key: TicketKey) -> Ticket:
    """Return the ticket with a proof by this key."""
    proof = Proof(
        key=key.public, content=content_of(said(ticket)), signature=key.sign(said(ticket))
    )
    return replace(ticket, proof=proof)


def altered(ticket: Ticket, **changes: Any) -> Ticket:
    """Return the ticket as its reader decodes it after somebody altered it."""
    assert ticket.proof is not None
    changed = replace(ticket, **changes)
    return replace(changed, proof=replace(ticket.proof, content=content_of(said(changed))))
