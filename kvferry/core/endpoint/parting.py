"""Connections that are given up: the driver closes them, and nobody waits for that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kvferry.core.endpoint.aside import Aside
from kvferry.core.endpoint.transfers import Transfers, as_ours
from kvferry.core.errors import TransportUsageError
from kvferry.core.failures import cause_of, on_one_line
from kvferry.core.transport import PeerId, Transport

logger = logging.getLogger(__name__)

LONGEST_SECONDS = 60.0
"""Between two tries to close a connection that does not fall silent."""


@dataclass(slots=True, kw_only=True)
class _Leaving:
    owner: Hashable
    due: float = 0.0
    tries: int = 0
    is_closing: bool = False


class Partings:
    """Connections on their way out. Used by the endpoint's thread only.

    Args:
        transport: whose connections they are.
        transfers: of the same transport.
        aside: makes the calls that close them.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        transport: Transport,
        transfers: Transfers,
        aside: Aside,
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._transfers = transfers
        self._aside = aside
        self._clock = clock
        self._leaving: dict[PeerId, _Leaving] = {}

    def __len__(self) -> int:
        """How many are not closed yet."""
        return len(self._leaving)

    @property
    def loud(self) -> int:
        """How many did not fall silent when they were closed: bytes may still land."""
        return sum(leaving.tries > 0 for leaving in list(self._leaving.values()))

    def includes(self, owner: Hashable) -> bool:
        """Whether a connection to this peer is not closed yet."""
        return any(leaving.owner == owner for leaving in self._leaving.values())

    def is_loud(self, owner: Hashable) -> bool:
        """Whether a connection to this peer did not fall silent when it was closed."""
        return any(each.owner == owner and each.tries for each in self._leaving.values())

    def add(self, peer: PeerId, owner: Hashable) -> None:
        """Close this connection to ``owner``; ends what runs on it."""
        self._leaving[peer] = _Leaving(owner=owner)
        self._close(peer)

    def progress(self, now: float) -> None:
        """Try again what is due."""
        for peer, leaving in list(self._leaving.items()):
            if not leaving.is_closing and now >= leaving.due:
                self._close(peer)

    def _close(self, peer: PeerId) -> None:
        self._leaving[peer].is_closing = True
        self._transfers.leave(peer)
        self._aside.run(
            lambda: self._transport.disconnect(peer), lambda outcome: self._closed(peer, outcome)
        )

    def _closed(self, peer: PeerId, error: Exception | None) -> None:
        self._transfers.left(peer)
        if error is None or isinstance(error, TransportUsageError):  # disconnected already
            del self._leaving[peer]
            return
        leaving = self._leaving[peer]
        leaving.is_closing = False
        if not leaving.tries:
            ours = as_ours(error)
            logger.error(
                "connection %d, to %s, did not fall silent (stage disconnect, cause %s): %s; the "
                "pages that it may still write are quarantined until it does: restart the engine "
                "if that lasts",
                peer,
                on_one_line(str(leaving.owner)),
                cause_of(ours),
                on_one_line(str(ours)),
            )
        leaving.tries += 1
        leaving.due = self._clock() + min(2.0**leaving.tries, LONGEST_SECONDS)
