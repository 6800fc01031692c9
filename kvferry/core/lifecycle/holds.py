"""Holds and the slot words that stand for them (docs/protocol.md, "Identities").

A producer rank keeps one 8-byte word per slot in registered memory. Consumers read the word with
one-sided reads, as they read the pages, and so find out whether the pages were still held.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import NewType

from kvferry.core.errors import TicketError
from kvferry.core.messages import GENERATION_LIMIT, MAX_SLOTS

Incarnation = NewType("Incarnation", int)
"""A random number that identifies one start of an engine."""

RequestId = NewType("RequestId", str)
"""An engine's id for a request. Ids are reused, so they prove nothing."""

NOTHING = 0
"""The slot word where no pages are held."""

_READY = 1


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Hold:
    """One request's pages on the producer, identified by a slot and a random generation.

    Attributes:
        slot: index of the slot.
        generation: random number that distinguishes the hold from earlier ones of the slot.

    Raises:
        TicketError: a number is out of bounds.
    """

    slot: int
    generation: int

    def __post_init__(self) -> None:
        if not 0 <= self.slot < MAX_SLOTS or not 0 < self.generation < GENERATION_LIMIT:
            raise TicketError(
                f"hold (slot {self.slot}, generation {self.generation}): a slot lies in 0 to "
                f"{MAX_SLOTS - 1}, a generation in 1 to {GENERATION_LIMIT - 1}"
            )

    @property
    def computing(self) -> int:
        """The slot's word while the pages are being computed."""
        return self.generation << 1

    @property
    def ready(self) -> int:
        """The slot's word when the pages may be read."""
        return self.computing | _READY

    def stands(self, word: int) -> bool:
        """Return whether a slot word says that this hold has the slot."""
        return word >> 1 == self.generation


def random_generation() -> int:
    """Return a random generation, so that a restarted engine does not repeat earlier ones."""
    return 1 + secrets.randbelow(GENERATION_LIMIT - 1)


def random_incarnation() -> Incarnation:
    """Return an incarnation for an engine that starts now."""
    return Incarnation(random_generation())
