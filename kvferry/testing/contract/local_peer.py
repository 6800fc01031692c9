"""A peer, in this process, of the transport under test."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.core.memory import Region
from kvferry.core.transport import Notification, Transport
from kvferry.testing.contract.workbench import MIB, Workbench
from kvferry.testing.memory import Buffer, Bytes, pattern


@dataclass(slots=True, eq=False)
class LocalPeer:
    """A peer in this process: a transport with a registered buffer of 1 MiB, filled with a pattern.

    The transport may be the one under test, which then connects to itself.

    Attributes:
        lab: The workbench of the test.
        transport: The peer's transport.
        seed: The seed of the buffer's content, for ``kvferry.testing.memory.pattern``.
        buffer: The buffer, registered with the transport.
    """

    lab: Workbench
    transport: Transport
    seed: int = 1
    buffer: Buffer = field(init=False)

    def __post_init__(self) -> None:
        self.buffer = self.lab.buffer(MIB, self.transport)
        self.buffer.put(pattern(MIB, self.seed))

    @property
    def name(self) -> str:
        """The transport's name."""
        return self.transport.name

    @property
    def region(self) -> Region:
        """The whole buffer, as a region."""
        return self.buffer.region

    def address(self) -> bytes:
        """Return the transport's address."""
        return self.transport.address()

    def get(self) -> Bytes:
        """Return all bytes of the buffer."""
        return self.buffer.get()

    def put(self, data: Bytes) -> None:
        """Overwrite the first bytes of the buffer with ``data``."""
        self.buffer.put(data)

    def reset(self) -> None:
        """Restore the buffer's initial content, and drop the notifications that have arrived."""
        self.buffer.put(pattern(MIB, self.seed))
        self.lab.turn()
        while self.transport.notifications():
            self.lab.turn()

    def register(self, region: Region) -> None:
        """Register memory with the peer's transport."""
        self.transport.register(region)

    def deregister(self, region: Region) -> None:
        """Deregister memory from the peer's transport."""
        self.transport.deregister(region)

    def notifications(self, count: int, seconds: float | None = None) -> list[Notification]:
        """Wait for notifications, and return them; see ``TransportPeer.notifications``."""
        found: list[Notification] = []

        def enough() -> bool:
            found.extend(self.transport.notifications())
            return len(found) >= count

        self.lab.until(enough, seconds)
        return found
