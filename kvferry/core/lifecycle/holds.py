"""Holds and their slot words (docs/protocol.md, "Identities").

A hold is the producer's promise to keep one request's pages. Until the hold ends, it occupies a
slot: on every producer rank, one 8-byte word in registered memory. Consumers read this slot word
with one-sided reads, as they read the pages, and so find out whether the pages were still held.
"""

from __future__ import annotations

import enum
import secrets
from dataclasses import dataclass
from typing import NewType

from kvferry.core.errors import TicketError
from kvferry.core.messages import MAX_SLOTS
from kvferry.core.side_channel_messages import GENERATION_LIMIT

Incarnation = NewType("Incarnation", int)
"""A random number that identifies one start of an engine."""

RequestId = NewType("RequestId", str)
"""An engine's id for a request. Ids are reused, so they prove nothing."""

NOTHING = 0
"""The value of a slot word while no hold occupies the slot."""

_READY = 1
"""The bit of a slot word that says that the pages may be read."""

_TOKEN_BITS = 32
"""The lower bits of a watermark, which have the number of tokens. The upper ones have as many low
bits of the generation."""


class HoldEnd(enum.StrEnum):
    """How a hold with a ticket ended."""

    READ = "read"
    """A consumer engine has sent "done": its ranks have read the pages, or needed none of them."""
    ABANDONED = "abandoned"
    """A consumer engine has sent "abandon": its load has failed, or was given up."""
    EXPIRED = "expired"
    """The lease ran out."""
    EVICTED = "evicted"
    """The ticket was given up because too many pages were held."""
    RECLAIMED = "reclaimed"
    """The ticket was a conversation's, and was given up because requests waited for pages."""
    ORPHANED = "orphaned"
    """The ticket was given up because requests waited for pages, and no consumer gave a sign of
    life."""
    REVOKED = "revoked"
    """The ticket was given up because the engine's caches were reset, because the ticket must not
    be used, or because the pages could not be copied to host pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedHold:
    """A hold with a ticket that has ended on one producer rank.

    Attributes:
        request: the producer's id of the request.
        end: how the hold ended; ``None`` if the scheduler process ordered it, or at shutdown.
        engine: id of the consumer engine that sent "done" or "abandon"; empty if none did.
    """

    request: RequestId
    end: HoldEnd | None = None
    engine: str = ""

    def combine(self, other: EndedHold) -> EndedHold:
        """Return how a request's hold ended on two ranks together: the worse of the two ends.

        It is worse that a lease ran out than that a consumer abandoned the hold, and that is worse
        than that a consumer has read the pages.

        Args:
            other: how the hold ended on another rank, or on several.
        """
        ends = [None, *HoldEnd]
        return max(self, other, key=lambda each: ends.index(each.end))


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Hold:
    """The producer's promise to keep one request's pages, identified by a slot and a generation.

    Attributes:
        slot: index of the slot in the slot table of every producer rank.
        generation: random number that distinguishes the hold from earlier holds of the slot.

    Raises:
        TicketError: the slot or the generation is out of bounds.
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
        """The value of the slot word while the pages are being computed."""
        return self.generation << 1

    @property
    def ready(self) -> int:
        """The value of the slot word when the pages may be read."""
        return self.computing | _READY

    def stands(self, word: int) -> bool:
        """Return whether a slot word says that this hold has not ended.

        True if the word equals ``computing`` or ``ready`` of this hold.
        """
        return word >> 1 == self.generation

    def watermark(self, tokens: int) -> int:
        """Return the watermark that says that the pages of this many first tokens are computed."""
        low = self.generation & ((1 << _TOKEN_BITS) - 1)
        return low << _TOKEN_BITS | min(tokens, (1 << _TOKEN_BITS) - 1)

    def marked_tokens(self, watermark: int) -> int:
        """Return for how many first tokens a watermark says that their pages are computed.

        Another hold of the slot may have the same low bits of the generation. So the slot word must
        have been read before, and said that this hold stood: a hold begins with a watermark of 0.

        Args:
            watermark: the watermark of the hold's slot.

        Returns:
            The number of tokens; 0 if the watermark is another hold's.
        """
        tokens = watermark & ((1 << _TOKEN_BITS) - 1)
        return tokens if watermark == self.watermark(tokens) else 0


def random_generation() -> int:
    """Return a new generation for a hold.

    Generations are random, so that a restarted engine does not use those of its last run again.
    """
    return 1 + secrets.randbelow(GENERATION_LIMIT - 1)


def random_incarnation() -> Incarnation:
    """Return a new incarnation: a random number that identifies one start of an engine."""
    return Incarnation(random_generation())
