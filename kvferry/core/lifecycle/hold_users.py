"""Count which requests of a consumer engine use a hold, and decide what says "done" about it.

Belongs to the scheduler half, which alone knows all requests. Several of them may come with one
ticket: the samples of one prompt, or a client that asks more than once. The engine's first complete
"done" ends the hold for all of them, so the last one says it. Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.lifecycle.ticket import Ticket

_Key = tuple[str, int, Hold]


@dataclass(slots=True, kw_only=True)
class _Use:
    ticket: Ticket
    """The one that "done" is ordered with."""
    requests: dict[RequestId, Ticket] = field(default_factory=dict)
    """The known users, each with the ticket that it came with."""
    is_done_bound: bool = False
    """One load says "done" or "abandon" by itself."""


class HoldUsers:
    """Count the known users of each hold: from an accepted ticket until their loads are over.

    Not thread-safe: the caller serialises. A request has at most one ticket at a time.
    """

    def __init__(self) -> None:
        self._uses: dict[_Key, _Use] = {}
        self._keys: dict[RequestId, _Key] = {}
        self._unused: dict[_Key, None] = {}

    def __len__(self) -> int:
        """Return how many holds have users, or a "done" that is to be ordered."""
        return len(self._uses)

    @property
    def pending(self) -> bool:
        """Whether ``take_unused`` has anything to return."""
        return bool(self._unused)

    def add(self, request: RequestId, ticket: Ticket) -> None:
        """Count a request whose ticket was accepted.

        A "done" that was not yet ordered waits for this one, too.
        """
        key = (ticket.engine, ticket.incarnation, ticket.hold)
        self._keys[request] = key
        self._uses.setdefault(key, _Use(ticket=ticket)).requests[request] = ticket
        self._unused.pop(key, None)

    def order(self, request: RequestId, *, siblings: bool = False) -> bool:
        """Decide who says "done" when the load of a known user is ordered.

        Args:
            request: whose load it is.
            siblings: whether more requests with its ticket are on their way.

        Returns:
            Whether the load shares the hold. Then it must tell the producer nothing; otherwise
            it is the only one that is known, and "done" or "abandon" is its own to say.
        """
        use = self._uses[self._keys[request]]
        shared = siblings or len(use.requests) > 1
        use.is_done_bound |= not shared
        return shared

    def over(self, request: RequestId, *, loaded: bool) -> None:
        """Count a request no more: all ranks have reported its load, or there will be none.

        Args:
            request: ignored if it is not counted.
            loaded: whether its load succeeded. That proves its ticket, of which those of others
                may differ: they came through clients.
        """
        key = self._keys.pop(request, None)
        if key is None:
            return
        use = self._uses[key]
        ticket = use.requests.pop(request)
        if loaded:
            use.ticket = ticket
        if use.requests:
            return
        if use.is_done_bound:
            del self._uses[key]
        else:
            self._unused[key] = None

    def take_unused(self) -> list[Ticket]:
        """Return a ticket of each hold that nobody uses any more, and about which no load says
        "done": it is to be ordered now."""
        tickets = [self._uses.pop(key).ticket for key in self._unused]
        self._unused.clear()
        return tickets
