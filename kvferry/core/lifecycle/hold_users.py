"""Track which requests of a consumer engine read the same hold, to know when to end the hold.

The producer ends it once every rank of an engine has sent "done", even if requests still read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.lifecycle.ticket import Ticket

_Key = tuple[str, int, Hold]
"""The producer engine, its incarnation, and the hold, as a ticket names them."""


@dataclass(slots=True, kw_only=True)
class _Use:
    ticket: Ticket
    """The ticket that ``take_unused`` will return."""
    requests: dict[RequestId, Ticket] = field(default_factory=dict)
    is_done_bound: bool = False
    """Whether the workers were told to start a load that itself sends "done" or "abandon"."""


class HoldUsers:
    """Count the users of each hold: the requests that have a ticket for it and are not over.

    A request that is loaded as the only user sends "done" itself. After the last user of a shared
    hold, the caller has the workers send it (``take_unused``). Not thread-safe.
    """

    def __init__(self) -> None:
        self._uses: dict[_Key, _Use] = {}
        self._keys: dict[RequestId, _Key] = {}
        self._unused: dict[_Key, None] = {}

    def __len__(self) -> int:
        """Return the number of holds with users, or that ``take_unused`` has yet to return."""
        return len(self._uses)

    @property
    def pending(self) -> bool:
        """Whether ``take_unused`` has anything to return."""
        return bool(self._unused)

    def add(self, request: RequestId, ticket: Ticket) -> None:
        """Count a request, not counted yet, as a user of its accepted ticket's hold."""
        key = (ticket.engine, ticket.incarnation, ticket.hold)
        self._keys[request] = key
        self._uses.setdefault(key, _Use(ticket=ticket)).requests[request] = ticket
        # All earlier users may be over: then the hold waits for this one, too.
        self._unused.pop(key, None)

    def order(self, request: RequestId, *, siblings: bool = False) -> bool:
        """Record that a counted request is loaded; return whether its load must not send "done".

        Others use its hold, or may come (``siblings``).
        """
        use = self._uses[self._keys[request]]
        shared = siblings or len(use.requests) > 1
        use.is_done_bound |= not shared
        return shared

    def over(self, request: RequestId, *, loaded: bool) -> None:
        """Stop counting a request, if it is: all ranks have reported its load, or there is none."""
        key = self._keys.pop(request, None)
        if key is None:
            return
        use = self._uses[key]
        ticket = use.requests.pop(request)
        # Its ticket is genuine, while a client may have altered that of another user.
        if loaded:
            use.ticket = ticket
        if use.requests:
            return
        if use.is_done_bound:
            del self._uses[key]
        else:
            self._unused[key] = None

    def take_unused(self) -> list[Ticket]:
        """Return, once, a ticket for each shared hold without users left, to send "done" with."""
        tickets = [self._uses.pop(key).ticket for key in self._unused]
        self._unused.clear()
        return tickets
