"""A loopback peer process that can also unmap its memory and execute another program."""

from __future__ import annotations

import ctypes
import os

from kvferry.testing.peer_process import PeerServer
from kvferry.testing.peers import Process


class Peer(Process):
    """A loopback peer process with 1 MiB registered."""

    def __init__(self) -> None:
        super().__init__(
            "kvferry.drivers.loopback:LoopbackTransport",
            {},
            "cpu",
            1 << 20,
            server="tests.drivers.loopback.peer:PeerCommands",
        )


class PeerCommands(PeerServer):
    """Commands of the peer process: each public method is one."""

    def unmap(self, offset: int, nbytes: int) -> int:
        """Unmap a part of the registered buffer."""
        address = ctypes.c_void_p(self.region.address + offset)
        return int(ctypes.CDLL(None).munmap(address, ctypes.c_size_t(nbytes)))

    def become(self, *command: str) -> None:
        """Execute another program in this process."""
        os.execv(command[0], command)
