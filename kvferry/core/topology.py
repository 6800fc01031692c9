"""Who reads which bytes from whom: the plan, a pure function of both engines' layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What one local rank reads from one remote rank.

    Attributes:
        remote: index of the remote rank.
    """

    remote: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one local rank reads, and whom it tells.

    Attributes:
        rank: index into the local layouts.
        sources: one per remote rank that this rank reads from, ascending.
        readers: per remote rank, how many local ranks say "done" to it; at least 1.
        tells: the remote ranks that nobody reads and that this rank tells, ascending.
    """

    rank: int
    sources: tuple[Source, ...]
    readers: tuple[int, ...]
    tells: tuple[int, ...]


def plan(local: Sequence[Layout], remote: Sequence[Layout], rank: int) -> Plan:
    """What local rank ``rank`` reads from the ranks of the other engine.

    Raises:
        PlanError: the layouts cannot be matched; names the field, the range and the ranks.
    """
    raise NotImplementedError
