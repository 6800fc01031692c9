"""Faults that only unusual sequences of calls show."""

from __future__ import annotations

from typing import Any

from kvferry.core.memory import Region
from kvferry.core.transport import PeerId
from kvferry.drivers.loopback import LoopbackTransport
from tests.long.drivers.planted.base import caught_by, connection_of


@caught_by("test_any_order_of_calls_does_what_the_model_does")
class DeregistersARegionOnlyOnce(LoopbackTransport):
    """A region that was deregistered and registered again cannot be deregistered again."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._once: set[Region] = set()

    def deregister(self, region: Region) -> None:
        if region in self._once:
            return
        super().deregister(region)
        self._once.add(region)


@caught_by("test_any_order_of_calls_does_what_the_model_does")
class LosesANotificationAfterReconnecting(LoopbackTransport):
    """The first free notification on a second connection is lost."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._ended = 0

    def disconnect(self, peer: PeerId) -> None:
        super().disconnect(peer)
        self._ended = 1

    def notify(self, peer: PeerId, payload: bytes) -> None:
        connection_of(self, peer)
        if self._ended == 1:
            self._ended = 2
            return
        super().notify(peer, payload)
