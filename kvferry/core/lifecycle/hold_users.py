"""Count the requests of a consumer engine that use a hold, and decide which of them ends it.

Used by the scheduler half, which alone knows all requests. Several requests may come with one
ticket: the samples of one prompt, or those of a client that asks more than once. The engine's first
complete "done" ends the hold for all of them, so it is sent after the last request. No I/O happens
here, and no clock is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.lifecycle.ticket import Ticket

_Key = tuple[str, int, Hold]


@dataclass(slots=True, kw_only=True)
class _Use:
    ticket: Ticket
    """The ticket that "done" is ordered with."""
    requests: dict[RequestId, Ticket] = field(default_factory=dict)
    """The users, each with its own ticket."""
    is_done_bound: bool = False
    """Whether a load that does not share the hold sends "done" or "abandon"."""


class HoldUsers:
    """Count the users of each hold, from an accepted ticket until their loads are over.

    Not thread-safe: the caller serialises. A request has at most one ticket at a time.
    """

    def __init__(self) -> None:
        self._uses: dict[_Key, _Use] = {}
        self._keys: dict[RequestId, _Key] = {}
        self._unused: dict[_Key, None] = {}

    def __len__(self) -> int:
        """Return how many holds have users or a "done" that is still to be ordered."""
        return len(self._uses)

    @property
    def pending(self) -> bool:
        """Whether ``take_unused`` has anything to return."""
        return bool(self._unused)

    def add(self, request: RequestId, ticket: Ticket) -> None:
        """Count a request whose ticket was accepted.

        A "done" that was not ordered yet waits for this request, too.
        """
        key = (ticket.engine, ticket.incarnation, ticket.hold)
        self._keys[request] = key
        self._uses.setdefault(key, _Use(ticket=ticket)).requests[request] = ticket
        self._unused.pop(key, None)

    def order(self, request: RequestId, *, siblings: bool = False) -> bool:
        """Decide whether a request's load shares the hold, when that load is ordered.

        Args:
            request: the request; it was added.
            siblings: whether more requests with the same ticket are to come.

        Returns:
            Whether the load shares the hold. If so, it must not notify the producer; otherwise its
            request is the only user, and it sends "done" or "abandon" itself.
        """
        use = self._uses[self._keys[request]]
        shared = siblings or len(use.requests) > 1
        use.is_done_bound |= not shared
        return shared

    def over(self, request: RequestId, *, loaded: bool) -> None:
        """Stop counting a request: all ranks have reported its load, or there will be none.

        Args:
            request: the request; ignored if it is not counted.
            loaded: whether its load succeeded. That proves its ticket, which "done" is then ordered
                with; the tickets of other users came through clients and may be wrong.
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
        """Return, once, a ticket of each hold that has no users left and needs a "done" now."""
        tickets = [self._uses.pop(key).ticket for key in self._unused]
        self._unused.clear()
        return tickets
