"""The models, and the faults that are planted in each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.core.lifecycle import conversations, early_tickets, protocol_faults, staged_model
from tests.core.lifecycle.machine import Protocol
from tests.core.lifecycle.model import Model

MODELS: dict[str, type[Model]] = {
    "protocol": Protocol,
    "staging": staged_model.Staging,
    "early tickets": early_tickets.EarlyTickets,
    "conversations": conversations.Conversations,
}

PLANTED: dict[str, dict[str, Any]] = {
    "protocol": {
        fault: replace(components, strict=fault in protocol_faults.FOUND_BY_TABLE)
        for fault, components in protocol_faults.PLANTED.items()
    },
    "staging": staged_model.PLANTED,
    "early tickets": early_tickets.PLANTED,
    "conversations": conversations.PLANTED,
}
"""By model and name of the fault, the components of the simulation with it."""

RARELY_FOUND = {
    ("protocol", "the newest answer is reclaimed first"),
    ("protocol", "heartbeats ignored"),
    ("early tickets", "a watermark read before its generation"),
    ("early tickets", "a watermark not zeroed at take-on"),
    ("early tickets", "the read of an old hold not awaited"),
    ("early tickets", "no fence"),
}
"""Faults that only their sequences find reliably."""


def plant(model: str, fault: str) -> type[Model]:
    """Return a model with a planted fault."""
    machine = MODELS[model]
    planted = type("Planted", (machine,), {"components": PLANTED[model][fault]})
    planted.__qualname__ = f"Planted[{fault}]"  # Hypothesis takes the seed from the name
    return planted
