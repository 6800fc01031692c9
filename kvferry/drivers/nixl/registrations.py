"""Registrations with NIXL. A user's regions may overlap; the *spans* registered for them never do.

NIXL bisects its registrations for an address, which fails if one lies within another. So a region
within a span is one more user of that span, and one that overlaps spans and reaches beyond them is
merged with them into a larger span.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from kvferry.core.errors import TransportError
from kvferry.core.memory import Region
from kvferry.drivers.nixl.agent import Agent, Registration


@dataclass(slots=True, kw_only=True, eq=False)
class RegisteredSpan:
    """A range of memory that is registered with NIXL, for one or more regions, its ``users``."""

    whole: Region
    key: int  # new for each registration, by which peers notice
    users: set[Region] = field(default_factory=set)
    held: dict[Agent, Registration] = field(default_factory=dict)  # by agent


class Registrations:
    """A transport's regions and the spans in which they lie (iteration), with all its ``agents``.

    Methods raise ``TransportError`` if NIXL refuses.
    """

    def __init__(self, agent: Agent) -> None:
        self.agents = [agent]
        self._spans: dict[Region, RegisteredSpan] = {}
        self._keys = itertools.count(1)
        # Held because an agent may join, within ``disconnect``, at the same time as other calls.
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[RegisteredSpan]:
        return iter(dict.fromkeys(self._spans.values()))

    def add(self, region: Region, used: Collection[Region]) -> None:
        """Register a region, in a span that contains it or in a new one, which may replace others.

        Refused, too, if a span would be replaced that has a region of ``used``, the local regions
        of unfinished transfers.
        """
        with self._lock:
            touched = [span for span in self if _overlap(span.whole, region)]
            span = next((span for span in touched if span.whole.contains(region)), None)
            if span is None:
                span = self._grown(region, touched, used)
            span.users.add(region)
            self._spans[region] = span

    def remove(self, region: Region) -> None:
        """Deregister a region, and its span if no other uses it."""
        with self._lock:
            span = self._spans.pop(region)
            span.users.discard(region)
            if not span.users:
                _deregister(span)

    def join(self, agent: Agent) -> None:
        """Register all spans with one more agent, or none if it refuses one."""
        with self._lock:
            try:
                for span in self:
                    span.held[agent] = agent.register(span.whole)
            except TransportError:
                for span in self:
                    if agent in span.held:
                        with contextlib.suppress(TransportError):
                            agent.deregister(span.held.pop(agent))
                raise
            self.agents.append(agent)

    def clear(self) -> None:
        """Deregister everything, as far as NIXL does it."""
        with self._lock:
            for span in self:
                with contextlib.suppress(TransportError):
                    _deregister(span)
            self._spans.clear()

    def _register(self, span: RegisteredSpan) -> None:
        """Register a span with every agent, or with none if one refuses."""
        span.key = next(self._keys)
        try:
            for agent in self.agents:
                span.held[agent] = agent.register(span.whole)
        except TransportError:
            _deregister(span)
            raise

    def _grown(
        self, region: Region, touched: list[RegisteredSpan], used: Collection[Region]
    ) -> RegisteredSpan:
        """Return a new span, of a region and the spans that it touches, which are replaced."""
        busy = [user for span in touched for user in span.users if user in used]
        if busy:
            raise TransportError(
                f"{region} overlaps {busy[0]}, which a transfer uses: register the larger region "
                "first, or poll until that transfer is final"
            )
        for span in touched:
            _deregister(span)
        grown = RegisteredSpan(whole=_hull([region, *(span.whole for span in touched)]), key=0)
        try:
            self._register(grown)
        except TransportError:
            for span in touched:
                self._register(span)
            raise
        for span in touched:
            grown.users |= span.users
        self._spans.update(dict.fromkeys(grown.users, grown))
        return grown


def _deregister(span: RegisteredSpan) -> None:
    """Deregister a span from every agent, then raise ``TransportError`` if one refused."""
    refused: TransportError | None = None
    while span.held:
        agent, registration = span.held.popitem()
        try:
            agent.deregister(registration)
        except TransportError as exc:
            refused = exc
    if refused is not None:
        raise refused


def _overlap(one: Region, other: Region) -> bool:
    same = (one.kind, one.device) == (other.kind, other.device)
    return same and one.address < other.end and other.address < one.end


def _hull(regions: list[Region]) -> Region:
    """Return the smallest range that contains these regions of one device."""
    first = min(region.address for region in regions)
    return Region(
        address=first,
        nbytes=max(region.end for region in regions) - first,
        kind=regions[0].kind,
        device=regions[0].device,
    )
