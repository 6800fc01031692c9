"""Connections that are given up: closed when nothing runs on them, and nobody waits for that."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass

from kvferry.core.endpoint.transfers import Transfers
from kvferry.core.errors import TransportUsageError
from kvferry.core.transport import PeerId, Transport

logger = logging.getLogger(__name__)

RUN_OUT_SECONDS = 1.0
"""How long what runs on a connection may take to end by itself, cancelled, before the driver is
told to end it: that may block."""
LONGEST_SECONDS = 60.0
"""Between two tries to close a connection that does not fall silent."""


@dataclass(slots=True, kw_only=True)
class _Leaving:
    owner: Hashable
    until: float
    tries: int = 0


class Partings:
    """Connections on their way out. Used by the endpoint's thread only."""

    def __init__(self, transport: Transport, transfers: Transfers) -> None:
        self._transport = transport
        self._transfers = transfers
        self._leaving: dict[PeerId, _Leaving] = {}

    def __len__(self) -> int:
        """How many are not closed yet."""
        return len(self._leaving)

    @property
    def loud(self) -> int:
        """How many did not fall silent when they were closed: bytes may still land."""
        return sum(leaving.tries > 0 for leaving in self._leaving.values())

    def includes(self, owner: Hashable) -> bool:
        """Whether a connection to this peer is not closed yet."""
        return any(leaving.owner == owner for leaving in self._leaving.values())

    def is_loud(self, owner: Hashable) -> bool:
        """Whether a connection to this peer did not fall silent when it was closed."""
        return any(each.owner == owner and each.tries for each in self._leaving.values())

    def add(self, peer: PeerId, owner: Hashable, now: float) -> None:
        """Close this connection to ``owner`` as soon as nothing runs on it; ends what does."""
        self._transfers.end(peer)
        self._leaving[peer] = _Leaving(owner=owner, until=now + RUN_OUT_SECONDS)
        self._close_if_idle(peer, now)

    def progress(self, now: float) -> None:
        """Close what can be closed without waiting, or has waited long enough."""
        for peer in list(self._leaving):
            self._close_if_idle(peer, now)

    def close(self) -> None:
        """Close all of them now; may block."""
        for peer in list(self._leaving):
            self._close(peer, 0.0)

    def _close_if_idle(self, peer: PeerId, now: float) -> None:
        leaving = self._leaving[peer]
        runs = self._transfers.runs(peer) or leaving.tries > 0
        if not runs or now >= leaving.until:
            self._close(peer, now)

    def _close(self, peer: PeerId, now: float) -> None:
        try:
            self._transport.disconnect(peer)
        except TransportUsageError:  # it is disconnected already
            del self._leaving[peer]
        except Exception:  # whatever a driver raises, bytes may still land
            leaving = self._leaving[peer]
            if not leaving.tries:
                logger.exception("connection %d did not fall silent; its pages stay", peer)
            leaving.tries += 1
            leaving.until = now + min(2.0**leaving.tries, LONGEST_SECONDS)
        else:
            del self._leaving[peer]
