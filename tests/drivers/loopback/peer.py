"""A loopback peer in a process of its own, that can also lose its memory and its program."""

from __future__ import annotations

import ctypes
import os

from kvferry.core.memory import Region
from kvferry.testing.memory import Bytes, pattern
from kvferry.testing.peer_process import PeerServer
from kvferry.testing.peers import Process

__all__ = ["Bytes", "Peer", "Served", "pattern"]

MIB = 1 << 20


class Peer(Process):
    """With 1 MiB registered."""

    def __init__(self) -> None:
        super().__init__(
            "kvferry.drivers.loopback:LoopbackTransport",
            {},
            "cpu",
            MIB,
            server="tests.drivers.loopback.peer:Served",
        )

    def part(self, offset: int, nbytes: int) -> Region:
        """A part of its memory."""
        return Region(address=self.region.address + offset, nbytes=nbytes)


class Served(PeerServer):
    """The child's end."""

    def unmap(self, offset: int, nbytes: int) -> int:
        """Give a part of the buffer back to the kernel."""
        address = ctypes.c_void_p(self.region.address + offset)
        return int(ctypes.CDLL(None).munmap(address, ctypes.c_size_t(nbytes)))

    def become(self, *command: str) -> None:
        """exec: another program in the same process."""
        os.execv(command[0], command)
