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

    It is a ``TransportPeer``. The transport may be the one under test, which then connects to
    itself.
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
        return self.transport.name

    @property
    def region(self) -> Region:
        return self.buffer.region

    def address(self) -> bytes:
        return self.transport.address()

    def get(self) -> Bytes:
        return self.buffer.get()

    def put(self, data: Bytes) -> None:
        self.buffer.put(data)

    def register(self, region: Region) -> None:
        self.transport.register(region)

    def deregister(self, region: Region) -> None:
        self.transport.deregister(region)

    def notifications(self, count: int, seconds: float | None = None) -> list[Notification]:
        found: list[Notification] = []

        def enough() -> bool:
            found.extend(self.transport.notifications())
            return len(found) >= count

        self.lab.until(enough, seconds)
        return found
