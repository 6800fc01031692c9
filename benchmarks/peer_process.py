"""The peer process of a benchmark: its memory, and commands that send notifications back."""

from __future__ import annotations

import mmap
import time
from typing import Any

import nixl_api

from kvferry.testing.memory import Bytes, CpuBuffer
from kvferry.testing.peer_process import PeerServer
from kvferry.testing.peers import Process

MESSAGE, DONE = b"x" * 64, b"y" * 64
"""The payload of notifications that are sent back, and of those that are not."""

THREADS = 4
"""The number of threads of NIXL's UCX, as in vLLM's own connector."""


class HugeBuffer(CpuBuffer):
    """Memory in pages of 2 MiB where the kernel gives them on request, as numpy requests them."""

    _advice = mmap.MADV_HUGEPAGE

    def __init__(self, nbytes: int) -> None:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(self._advice)
        self._map(memory)
        self._bytes[:] = 1  # touch the pages now, so that the first read need not

    @property
    def view(self) -> Bytes:
        """Return the buffer as an array."""
        return self._bytes


class SmallBuffer(HugeBuffer):
    """Memory in pages of 4 KiB, as malloc gives where huge pages come only on request."""

    _advice = mmap.MADV_NOHUGEPAGE


PAGES = {"huge": HugeBuffer, "small": SmallBuffer}


class PeerCommands(PeerServer):
    """Commands of the peer process; each public method is one."""

    _agent: Any = None

    def echo(self, address: bytes, count: int) -> None:
        """Send a number of notifications back through the driver."""
        peer = self.transport.connect(address)
        while count:
            self.turn()
            found = [one.payload for one in self.transport.notifications()]
            for payload in filter(MESSAGE.__eq__, found):
                self.transport.notify(peer, payload)
                count -= 1
            time.sleep(0)  # a driver's own thread needs the interpreter lock

    def nothing(self) -> None:
        """Do nothing; measures a call alone."""

    def agent(self, metadata: bytes) -> bytes:
        """Make a NIXL agent with another one as its peer, and return its metadata."""
        self._agent = nixl_api.bare(THREADS)
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


class BenchmarkPeer(Process):
    """A peer process with a transport of a driver."""

    def __init__(self, driver: str, memory: str, nbytes: int) -> None:
        arguments, factory = (
            {"name": driver, "options": {}},
            "kvferry.core.transport.registry:create",
        )
        super().__init__(
            factory, arguments, memory, nbytes, server="peer_process:PeerCommands", wait=False
        )

    def nothing(self) -> None:
        """Call the process and wait for its answer."""
        self.ask("nothing")

    def begin_echo(self, command: str, *arguments: object) -> None:
        """Start ``echo`` or ``echo_direct``, for which ``end_echo`` waits."""
        self._connection.send((command, arguments))

    def end_echo(self) -> None:
        """Wait until all notifications have been sent back."""
        self._answer("echo", 60.0)
