"""Faults of ``connect`` and ``disconnect`` during other calls."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

from kvferry.core.transport.base import _IdentityLocks
from kvferry.drivers.loopback import LoopbackTransport
from tests.long.drivers.planted.base import caught_by


class NoLocks(_IdentityLocks):
    """Locks that exclude nobody."""

    @contextlib.contextmanager
    def locked(self, identity: Hashable) -> Iterator[None]:
        del identity
        yield


@caught_by("test_connecting_during_a_disconnect_gives_a_live_peer")
class ConnectsToAPeerThatIsDisconnected(LoopbackTransport):
    """``connect`` during ``disconnect`` of a peer returns the id that ``disconnect`` ends."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._identity_locks = NoLocks()
