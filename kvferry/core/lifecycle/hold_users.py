"""Count the requests of a consumer engine that use a hold, and decide which of them ends the hold.

A hold stands for one request's pages on the producer. Used by the consumer's scheduler half, which
alone knows all requests. Several requests may come with one ticket: the samples of one prompt, or
requests of a client that asks more than once. The first "done" that all ranks of this engine have
sent ends the hold for all of these requests, so "done" must wait for the last of them. No I/O
happens here, and no clock is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.lifecycle.ticket import Ticket

_Key = tuple[str, int, Hold]
"""The producer engine, its incarnation, and the hold, as a ticket names them."""


@dataclass(slots=True, kw_only=True)
class _Use:
    """The users of one hold."""

    ticket: Ticket
    """The ticket with which "done" will be ordered."""
    requests: dict[RequestId, Ticket] = field(default_factory=dict)
    """Each request that uses the hold, to the ticket that it came with."""
    is_done_bound: bool = False
    """Whether a load was ordered that sends "done" or "abandon" itself."""


class HoldUsers:
    """Count the users of each hold: the requests that have a ticket for it and are not over.

    The message "done" tells the producer that nobody needs the hold any more.

    Not thread-safe: the caller serialises. A request has at most one ticket at a time.
    """

    def __init__(self) -> None:
        self._uses: dict[_Key, _Use] = {}
        self._keys: dict[RequestId, _Key] = {}
        self._unused: dict[_Key, None] = {}

    def __len__(self) -> int:
        """Return the number of holds that have users or for which "done" must still be ordered."""
        return len(self._uses)

    @property
    def pending(self) -> bool:
        """Whether ``take_unused`` has anything to return."""
        return bool(self._unused)

    def add(self, request: RequestId, ticket: Ticket) -> None:
        """Count a request as a user of the hold that its ticket names.

        If the hold has no users left but its "done" has not been ordered yet, "done" now waits for
        this request.

        Args:
            request: the request, which is not counted yet.
            ticket: the ticket that the request came with, which this engine has accepted.
        """
        key = (ticket.engine, ticket.incarnation, ticket.hold)
        self._keys[request] = key
        self._uses.setdefault(key, _Use(ticket=ticket)).requests[request] = ticket
        self._unused.pop(key, None)

    def order(self, request: RequestId, *, siblings: bool = False) -> bool:
        """Record that a request's load is being ordered, and decide whether it shares its hold.

        Args:
            request: the request, which was passed to ``add`` before.
            siblings: whether more requests with the same ticket are to come.

        Returns:
            Whether the load shares the hold with other requests. A load that shares its hold must
            not notify the producer. Any other load sends "done" or "abandon" itself, because its
            request is the hold's only user.
        """
        use = self._uses[self._keys[request]]
        shared = siblings or len(use.requests) > 1
        use.is_done_bound |= not shared
        return shared

    def over(self, request: RequestId, *, loaded: bool) -> None:
        """Stop counting a request whose load all ranks have reported, or that is not to be loaded.

        Args:
            request: the request; ignored if it is not counted.
            loaded: whether its load succeeded. If so, its ticket is genuine, and "done" will be
                ordered with that ticket; the tickets of other users may have been altered by
                clients.
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
        """Return a ticket of each hold that has no users left and for which nobody sends "done".

        Each such hold is returned once; the caller must order its "done".
        """
        tickets = [self._uses.pop(key).ticket for key in self._unused]
        self._unused.clear()
        return tickets
