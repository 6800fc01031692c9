"""A peer in this process."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.core.memory import Region
from kvferry.core.transport import Transport
from kvferry.testing.contract.workbench import MIB, Workbench
from kvferry.testing.memory import Buffer, Bytes, pattern
from kvferry.testing.peer_process import Seen


@dataclass(slots=True, eq=False)
class LocalPeer:
    """Another transport, or the one under test itself, with 1 MiB of a pattern."""

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

    def notifications(self, count: int, seconds: float | None = None) -> list[Seen]:
        found: list[Seen] = []

        def enough() -> bool:
            arrived = self.transport.notifications()
            first = int(self.buffer.get(0, 1)[0]) if arrived else 0
            found.extend(Seen(sender=n.sender, payload=n.payload, first=first) for n in arrived)
            return len(found) >= count

        self.lab.until(enough, seconds)
        return found
