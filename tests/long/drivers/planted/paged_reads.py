"""Planted faults in reads by pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np

from kvferry.core.transport import (
    PagedCopies,
    PagedRequest,
    PeerId,
    PlacedStrips,
    Strips,
    TransferId,
    TransferRequest,
)
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback.transport import LoopbackConnection
from kvferry.drivers.loopback.worker_pool import LoopbackTransfer
from tests.long.drivers.planted.base import OtherCapabilities, caught_by


class ReadsPages(LoopbackTransport):
    """Base class: loopback with reads by pages, whose copies a subclass alters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._capabilities = replace(self._capabilities, paged_reads=True)

    def _start_paged(self, request: PagedRequest[LoopbackConnection]) -> LoopbackTransfer:
        connection, pages, local, remote, notify = request
        copies = self.written_out(connection, pages)
        return self._start(TransferRequest(connection, copies, local, remote, notify))

    def written_out(self, connection: LoopbackConnection, pages: PagedCopies) -> Copies:
        return pages.written_out()


@caught_by("test_paged_read_moves_the_right_bytes")
class IgnoresPlacesWithinPages(ReadsPages):
    """All places of a page are taken for its first."""

    def written_out(self, connection: LoopbackConnection, pages: PagedCopies) -> Copies:
        parts = tuple(
            replace(part, local=part.local % part.strips.local.pages) for part in pages.parts
        )
        return PagedCopies(parts=parts).written_out()


@caught_by("test_paged_read_moves_the_right_bytes")
class ExceedsCapabilities(OtherCapabilities, ReadsPages):
    """It can do what its capabilities deny."""

    can: ClassVar = {"paged_reads": False}


@caught_by("test_paged_read_moves_the_right_bytes")
class KeepsTheFirstPlaces(ReadsPages):
    """What was prepared for strips keeps the places of the first read."""

    def written_out(self, connection: LoopbackConnection, pages: PagedCopies) -> Copies:
        first: dict[Strips, PlacedStrips] = self.__dict__.setdefault("first", {})
        parts = tuple(first.setdefault(part.strips, part) for part in pages.parts)
        return PagedCopies(parts=parts).written_out()


@caught_by("test_strips_of_two_objects_in_one_read")
class ReadsOnlyTheFirstStrips(ReadsPages):
    """Of several strips in one read, only the first are read."""

    def written_out(self, connection: LoopbackConnection, pages: PagedCopies) -> Copies:
        return PagedCopies(parts=pages.parts[:1]).written_out()


@caught_by("test_places_that_do_not_exist_are_refused")
class ClipsPlaces(ReadsPages):
    """A place that does not exist is taken for the last."""

    def read_pages(
        self, peer: PeerId, pages: PagedCopies, notify: bytes | None = None
    ) -> TransferId:
        parts = tuple(
            replace(
                part,
                local=np.clip(part.local, 0, part.strips.local.places - 1),
                remote=np.clip(part.remote, 0, part.strips.remote.places - 1),
            )
            for part in pages.parts
        )
        return super().read_pages(peer, PagedCopies(parts=parts), notify)


@caught_by("test_notification_bound_to_a_paged_read")
class DropsTheBoundNotification(ReadsPages):
    """A read by pages sends no notification."""

    def _start_paged(self, request: PagedRequest[LoopbackConnection]) -> LoopbackTransfer:
        return super()._start_paged(request._replace(notify=None))


@caught_by("test_strips_outlive_what_a_driver_prepared")
class ForgetsNothing(ReadsPages):
    """Strips that were read once are read again although their memory is not registered."""

    def _checked(self, peer: PeerId, segments: Any, notify: bytes | None) -> Any:
        unknown = {segment.local: None for segment in segments} | self._registered
        with patch.object(self, "_registered", unknown):
            return super()._checked(peer, segments, notify)
