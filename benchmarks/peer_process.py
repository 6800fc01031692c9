"""The peer process of ``drivers``: its memory, and commands that send notifications back."""

from __future__ import annotations

import mmap
import time
from typing import Any

import numpy as np

from benchmarks import nixl_api
from kvferry.core.memory import region_of
from kvferry.testing.memory import Bytes, CpuBuffer
from kvferry.testing.peer_process import PeerServer

MESSAGE, DONE = b"x" * 64, b"y" * 64
"""The payload of notifications that are sent back, and of those that are not."""


class HugeBuffer(CpuBuffer):
    """Memory in pages of 2 MiB where the kernel gives them on request, as numpy requests them."""

    def __init__(self, nbytes: int) -> None:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(memory, np.uint8)
        self._region = region_of(self._bytes)
        self._bytes[:] = 1  # touch the pages now, so that the first read need not

    @property
    def view(self) -> Bytes:
        """Return the buffer as an array."""
        return self._bytes


class PeerCommands(PeerServer):
    """Commands of the peer process; each public method is one."""

    _agent: Any = None

    def echo(self, address: bytes, count: int) -> None:
        """Send a number of notifications back through the driver."""
        peer = self.transport.connect(address)
        while count:
            self.turn()
            for one in self.transport.notifications():
                if one.payload == MESSAGE:
                    self.transport.notify(peer, MESSAGE)
                    count -= 1
            time.sleep(0)  # a driver's own thread needs the interpreter lock

    def agent(self, metadata: bytes) -> bytes:
        """Make a NIXL agent with another one as its peer, and return its metadata."""
        self._agent = nixl_api.bare()
        self._known = self._agent.add_remote_agent(metadata).decode()
        found: bytes = self._agent.get_agent_metadata()
        return found

    def echo_direct(self, count: int) -> None:
        """Send a number of notifications back by NIXL's own calls."""
        while count:
            for payload in self._agent.get_new_notifs().get(self._known, ()):
                self._agent.send_notif(self._known, payload)
                count -= 1
            time.sleep(0)
