"""A peer's process with memory that it can give back to the kernel."""

from __future__ import annotations

import mmap

import numpy as np

from kvferry.core.memory import Region
from kvferry.core.transport import PeerId, TransferId
from kvferry.testing.peer_process import PeerServer, PeerSetup


class Mapped(PeerServer):
    """Each public method is a command."""

    def __init__(self, orders: PeerSetup) -> None:
        super().__init__(orders)
        self._memory: mmap.mmap | None = None
        self._begun: TransferId | None = None

    def map(self, nbytes: int) -> Region:
        """Register fresh memory."""
        self._memory = mmap.mmap(-1, nbytes)
        array = np.frombuffer(self._memory, np.uint8)
        region = Region(address=array.ctypes.data, nbytes=nbytes)
        del array
        self.transport.register(region)
        return region

    def unmap(self, region: Region) -> None:
        """Deregister it, and let it go: whoever touches it crashes."""
        self.transport.deregister(region)
        if self._memory is not None:
            self._memory.close()

    def start_only(self, op: str, peer: PeerId, copies: object) -> None:
        """Begin a transfer."""
        self._begun = getattr(self.transport, op)(peer, copies)

    def state(self) -> str:
        """Of the transfer that was begun."""
        if self._begun is None:
            return ""
        (status,) = self.transport.poll([self._begun])
        return status.state.value
