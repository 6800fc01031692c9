"""Commands of a peer process that can unmap registered memory."""

from __future__ import annotations

import mmap

import numpy as np

from kvferry.core.memory import Region
from kvferry.core.transport import PeerId, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.testing.peer_process import PeerServer, PeerSetup


class Mapped(PeerServer):
    """Commands of the peer process: each public method is one."""

    def __init__(self, orders: PeerSetup) -> None:
        super().__init__(orders)
        self._memory: mmap.mmap | None = None
        self._begun: TransferId | None = None

    def map(self, nbytes: int) -> Region:
        """Map and register new memory."""
        self._memory = mmap.mmap(-1, nbytes)
        array = np.frombuffer(self._memory, np.uint8)
        region = Region(address=array.ctypes.data, nbytes=nbytes)
        del array
        self.transport.register(region)
        return region

    def unmap(self, region: Region) -> None:
        """Deregister the memory and unmap it, so that any access crashes."""
        self.transport.deregister(region)
        if self._memory is not None:
            self._memory.close()

    def start_only(self, peer: PeerId, copies: Copies) -> None:
        """Start a read without waiting for its end."""
        self._begun = self.transport.read(peer, copies)

    def state(self) -> str:
        """Return the state of the transfer that was started."""
        if self._begun is None:
            return ""
        (status,) = self.transport.poll([self._begun])
        return str(status.state.value)
