"""Holds, and the words that say on every producer rank whether they stand (docs/protocol.md)."""

from __future__ import annotations

import enum
import secrets
from dataclasses import dataclass
from typing import NewType

from kvferry.core.errors import CopyError, TicketError
from kvferry.core.messages import MAX_SLOTS
from kvferry.core.side_channel_messages import GENERATION_LIMIT

Incarnation = NewType("Incarnation", int)
"""A random number that identifies one start of an engine."""

RequestId = NewType("RequestId", str)
"""An engine's id for a request. Ids are reused, so they prove nothing."""

NOTHING = 0
"""The value of a slot word while no hold occupies the slot."""

_READY = 1

_TOKEN_BITS = 32
"""The lower bits of a watermark, the number of tokens; the rest are low bits of the generation."""


class HoldEnd(enum.StrEnum):
    """How a hold with a ticket ended, from the best to the worst."""

    READ = "read"  # a consumer engine has sent "done": all was read, or is not needed
    ABANDONED = "abandoned"  # a consumer engine has sent "abandon"
    EXPIRED = "expired"  # the lease ran out
    EVICTED = "evicted"  # too many pages were held
    RECLAIMED = "reclaimed"  # a conversation's: requests waited for pages
    ORPHANED = "orphaned"  # requests waited for pages, and no consumer gave a sign of life
    REVOKED = "revoked"  # caches were reset, it must not be used, or copying to the host failed


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedHold:
    """A hold with a ticket that has ended on one rank; ``engine`` is the consumer that ended it."""

    request: RequestId
    # None if the scheduler half ordered it, or at shutdown.
    end: HoldEnd | None = None
    engine: str = ""

    def combine(self, other: EndedHold) -> EndedHold:
        """Return how a request's hold ended on two ranks together: the worse of the two ends."""
        ends = [None, *HoldEnd]
        return max(self, other, key=lambda each: ends.index(each.end))


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Hold:
    """A promise to keep one request's pages: a slot and a random generation, both within bounds."""

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
        """Return whether a slot word says that this hold has not ended."""
        return word >> 1 == self.generation

    def watermark(self, tokens: int) -> int:
        """Return the watermark that says that the pages of this many first tokens are computed."""
        low = self.generation & ((1 << _TOKEN_BITS) - 1)
        return low << _TOKEN_BITS | min(tokens, (1 << _TOKEN_BITS) - 1)

    def marked_tokens(self, watermark: int) -> int:
        """Return for how many first tokens pages are computed; 0 if it is another hold's watermark.

        Only valid after the slot word was read and said that this hold stood: another hold may have
        the same low bits of the generation, but begins with a watermark of 0.
        """
        tokens = watermark & ((1 << _TOKEN_BITS) - 1)
        return tokens if watermark == self.watermark(tokens) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """A copy of whole blocks to or from as many host pages; ``CopyError`` if numbers differ."""

    blocks: tuple[int, ...] = ()
    pages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.blocks) != len(self.pages):
            raise CopyError(
                f"a copy of {len(self.blocks)} blocks names {len(self.pages)} host pages: it needs "
                "one for each block"
            )


def random_generation() -> int:
    """Return a new generation; it is random, so that a restarted engine repeats none."""
    return 1 + secrets.randbelow(GENERATION_LIMIT - 1)


def random_incarnation() -> Incarnation:
    """Return a new incarnation."""
    return Incarnation(random_generation())
