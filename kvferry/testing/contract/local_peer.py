"""A peer of the transport under test in this process."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.core.memory import Region
from kvferry.core.transport import Transport
from kvferry.testing.contract.workbench import MIB, Workbench
from kvferry.testing.memory import Buffer, Bytes, pattern
from kvferry.testing.peer_process import Seen


@dataclass(slots=True, eq=False)
class LocalPeer:
    """A transport of this process, maybe the one under test, with 1 MiB of a pattern.

    Attributes:
        lab: The workbench of the test.
        transport: The peer's transport.
        seed: Of the buffer's content.
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
        """The buffer's region."""
        return self.buffer.region

    def address(self) -> bytes:
        """Return the transport's address."""
        return self.transport.address()

    def get(self) -> Bytes:
        """Return the buffer's bytes."""
        return self.buffer.get()

    def put(self, data: Bytes) -> None:
        """Overwrite the buffer from its start."""
        self.buffer.put(data)

    def register(self, region: Region) -> None:
        """Register memory."""
        self.transport.register(region)

    def deregister(self, region: Region) -> None:
        """Deregister memory."""
        self.transport.deregister(region)

    def notifications(self, count: int, seconds: float | None = None) -> list[Seen]:
        """Return ``count`` notifications, or fewer if the time is up before they arrive."""
        seen: list[Seen] = []

        def enough() -> bool:
            arrived = self.transport.notifications()
            first = int(self.buffer.get(0, 1)[0]) if arrived else 0
            seen.extend(Seen(sender=n.sender, payload=n.payload, first=first) for n in arrived)
            return len(seen) >= count

        self.lab.until(enough, seconds)
        return seen
