"""The models, and the faults that are planted in each of them."""

from __future__ import annotations

from tests.core.lifecycle import conversations, early_tickets, protocol_faults, staged_model
from tests.core.lifecycle.machine import Protocol
from tests.core.lifecycle.model import Components, Faults, Model

MODELS: dict[str, type[Model]] = {
    "protocol": Protocol,
    "staging": staged_model.Staging,
    "early tickets": early_tickets.EarlyTickets,
    "conversations": conversations.Conversations,
}

PLANTED: dict[str, Faults] = {
    "protocol": protocol_faults.PLANTED,
    "staging": staged_model.PLANTED,
    "early tickets": early_tickets.PLANTED,
    "conversations": conversations.PLANTED,
}

RARELY_FOUND = {
    ("protocol", "the newest answer is reclaimed first"),
    ("protocol", "heartbeats ignored"),
    ("early tickets", "a watermark read before its generation"),
    ("early tickets", "a watermark not zeroed at take-on"),
    ("early tickets", "the read of an old hold not awaited"),
    ("early tickets", "no fence"),
    ("protocol", "the TTL counts from the order"),
    ("protocol", "a TTL at each renewal"),
    ("protocol", "a claim before ready does not count"),
    ("protocol", "a claim before the order is lost"),
}
"""Faults that only their sequences find reliably."""


def plant(model: str, fault: str) -> type[Model]:
    """Return a model with a planted fault."""
    machine, faults = MODELS[model], PLANTED[model]
    components = Components(faults[fault], strict=fault in faults.by_table)
    planted = type("Planted", (machine,), {"components": components})
    planted.__qualname__ = f"Planted[{fault}]"  # Hypothesis takes the seed from the name
    return planted
