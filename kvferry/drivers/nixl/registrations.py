"""Registrations with NIXL. A user's regions may overlap; the *spans* registered for them never do.

NIXL bisects its registrations for an address, which fails if one lies within another. So a region
within a span is one more user of that span, and one that overlaps spans and reaches beyond them is
merged with them into a larger span.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.core.errors import TransportError
from kvferry.core.memory import Region
from kvferry.drivers.nixl.agent import Registration


class Registrar(Protocol):
    """Registers memory with NIXL; implemented by ``AgentPair``."""

    def register(self, region: Region) -> Registration:
        """Register memory, and return its handle; raise ``TransportError`` if NIXL refuses."""

    def deregister(self, registration: Registration) -> None:
        """Deregister the memory of a handle; raise ``TransportError`` if NIXL refuses."""


@dataclass(slots=True, kw_only=True, eq=False)
class RegisteredSpan:
    """A range of memory that is registered with NIXL, for one or more regions, its ``users``."""

    whole: Region
    key: int  # new for each registration, by which peers notice
    registration: Registration
    users: set[Region] = field(default_factory=set)


class Registrations:
    """A transport's regions (see ``in``), and the spans in which they lie (iteration)."""

    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar
        self._spans: dict[Region, RegisteredSpan] = {}
        self._keys = itertools.count(1)

    def __iter__(self) -> Iterator[RegisteredSpan]:
        return iter(dict.fromkeys(self._spans.values()))

    def __contains__(self, region: Region) -> bool:
        return region in self._spans

    @property
    def regions(self) -> Collection[Region]:
        """The registered regions."""
        return self._spans.keys()

    def add(self, region: Region, used: Collection[Region]) -> None:
        """Register a region, in a span that contains it or in a new one, which may replace others.

        Raise ``TransportError`` if NIXL refuses, or a span would be replaced that has a region of
        ``used``, the local regions of unfinished transfers.
        """
        touched = [span for span in self if _overlap(span.whole, region)]
        within = next((span for span in touched if span.whole.contains(region)), None)
        if within is None:
            within = self._grown(region, touched, used) if touched else self._made(region)
        within.users.add(region)
        self._spans[region] = within

    def remove(self, region: Region) -> None:
        """Deregister a region, and its span if unused; raise ``TransportError`` if NIXL refuses."""
        span = self._spans.pop(region)
        span.users.discard(region)
        if not span.users:
            self._registrar.deregister(span.registration)

    def clear(self) -> list[TransportError]:
        """Deregister everything; return the errors of the spans that NIXL did not deregister."""
        failed = []
        for span in self:
            try:
                self._registrar.deregister(span.registration)
            except TransportError as exc:
                failed.append(exc)
        self._spans.clear()
        return failed

    def _made(self, whole: Region) -> RegisteredSpan:
        return RegisteredSpan(
            whole=whole, key=next(self._keys), registration=self._registrar.register(whole)
        )

    def _grown(
        self, region: Region, touched: list[RegisteredSpan], used: Collection[Region]
    ) -> RegisteredSpan:
        busy = [user for span in touched for user in span.users if user in used]
        if busy:
            raise TransportError(
                f"{region} overlaps {busy[0]}, which a transfer uses: register the larger region "
                "first, or poll until that transfer is final"
            )
        for span in touched:
            self._registrar.deregister(span.registration)
        try:
            grown = self._made(_hull([region, *(span.whole for span in touched)]))
        except TransportError:
            for span in touched:
                span.registration = self._registrar.register(span.whole)
                span.key = next(self._keys)
            raise
        for span in touched:
            grown.users |= span.users
        self._spans.update(dict.fromkeys(grown.users, grown))
        return grown


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
