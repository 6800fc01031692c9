"""Tickets that were altered after they were proved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.security.proof import content_of


def said(ticket: Ticket) -> dict[str, Any]:
    """Return the part of a ticket that its proof covers."""
    return {**msgspec.to_builtins(ticket), "proof": None, "routed": None}


def altered(ticket: Ticket, **changes: Any) -> Ticket:
    """Return the ticket as its reader decodes it after somebody altered it."""
    assert ticket.proof is not None
    changed = replace(ticket, **changes)
    return replace(changed, proof=replace(ticket.proof, content=content_of(said(changed))))
