"""All that an endpoint's thread does with its driver, for the parts of the endpoint that do it."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.core.driver_calls.connections import BlockingCalls, Connections
from kvferry.core.driver_calls.error_containment import ErrorContainment
from kvferry.core.driver_calls.transfers import Transfers
from kvferry.core.transport import EnterThread, Transport, enter_nothing


class DriverCalls:
    """The driver of an endpoint, its reads and connections. Used by the endpoint's thread only.

    ``post`` has a command run on that thread. With ``threads``, calls that block have threads of
    their own, in each of which ``enter`` is called first.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        threads: bool = False,
        enter: EnterThread = enter_nothing,
    ) -> None:
        self.transport, self.post, self.clock = transport, post, clock
        self.containment = ErrorContainment()
        self.contain = self.containment.run
        self.transfers = Transfers(transport, self.containment, clock)
        self.blocking = BlockingCalls(threads=threads, post=post, clock=clock, enter=enter)
        self.connections = Connections(transport, self.transfers, self.blocking, clock)

    @property
    def problems(self) -> list[str]:
        """Return the texts for a health check. Thread-safe."""
        sources = (self.connections, self.blocking, self.containment)
        return [problem for source in sources for problem in source.problems]
