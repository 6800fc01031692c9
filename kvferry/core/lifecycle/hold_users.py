"""Track which requests of a consumer engine read the same hold, to know when to end the hold.

A hold is the producer's promise to keep one request's pages. Several requests of the consumer
engine may come with the same ticket, and so read the same hold: the samples of one prompt, or
requests of a client that asks more than once. The producer ends the hold as soon as every rank of
the consumer engine has sent "done", even if other requests still read the pages. So "done" must not
be sent before the last of these requests is over.

Used by the part of the consumer that runs in its scheduler process, which alone knows all requests.
No I/O happens here, and no clock is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.lifecycle.ticket import Ticket

_Key = tuple[str, int, Hold]
"""The producer engine, its incarnation, and the hold, as a ticket names them."""


@dataclass(slots=True, kw_only=True)
class _Use:
    """The requests of this engine that came with a ticket for the same hold and are not over."""

    ticket: Ticket
    """The ticket that ``take_unused`` will return."""
    requests: dict[RequestId, Ticket] = field(default_factory=dict)
    """Each request that uses the hold, to the ticket that came with the request."""
    is_done_bound: bool = False
    """Whether the workers were told to start a load that itself sends "done" or "abandon"."""


class HoldUsers:
    """Count the users of each hold: the requests that have a ticket for it and are not over.

    A hold is the producer's promise to keep one request's pages; the message "done" ends it. A load
    that starts while its request is the only user sends "done" itself. If a hold has several users,
    their loads do not send it; after the last user is over, the caller has the workers send it (see
    ``take_unused``).

    Not thread-safe: the caller serialises. A request has at most one ticket at a time.
    """

    def __init__(self) -> None:
        self._uses: dict[_Key, _Use] = {}
        self._keys: dict[RequestId, _Key] = {}
        self._unused: dict[_Key, None] = {}

    def __len__(self) -> int:
        """Return the number of holds that have users or that ``take_unused`` has yet to return."""
        return len(self._uses)

    @property
    def pending(self) -> bool:
        """Whether ``take_unused`` has anything to return."""
        return bool(self._unused)

    def add(self, request: RequestId, ticket: Ticket) -> None:
        """Count a request as a user of the hold that its ticket names.

        If all earlier users of the hold are over and ``take_unused`` has not returned the hold yet,
        it will be returned only after this request is over, too.

        Args:
            request: the request, which is not counted yet.
            ticket: the ticket that the request came with, which this engine has accepted.
        """
        key = (ticket.engine, ticket.incarnation, ticket.hold)
        self._keys[request] = key
        self._uses.setdefault(key, _Use(ticket=ticket)).requests[request] = ticket
        self._unused.pop(key, None)

    def order(self, request: RequestId, *, siblings: bool = False) -> bool:
        """Record that the workers are told to load a request; return whether its hold is shared.

        Args:
            request: the request, which was passed to ``add`` before.
            siblings: whether more requests with the same ticket may come.

        Returns:
            Whether other requests use the hold or may come to use it. If so, this load must not
            notify the producer. If not, the load sends "done" or "abandon" itself.
        """
        use = self._uses[self._keys[request]]
        shared = siblings or len(use.requests) > 1
        use.is_done_bound |= not shared
        return shared

    def over(self, request: RequestId, *, loaded: bool) -> None:
        """Stop counting a request as a user of its hold.

        Called when all ranks have reported the request's load, or when the request will not be
        loaded.

        Args:
            request: the request; ignored if it is not counted.
            loaded: whether the request's load succeeded. If so, the request's ticket is genuine,
                and ``take_unused`` will return this ticket, not that of another user, which a
                client may have altered.
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
        """Return a ticket for each shared hold whose users are all over.

        No load has sent "done" for these holds, so the caller must now have the workers send "done"
        with the returned tickets. Each hold is returned once.
        """
        tickets = [self._uses.pop(key).ticket for key in self._unused]
        self._unused.clear()
        return tickets
