"""The other process of a benchmark: its memory, and a peer that sends notifications back."""

from __future__ import annotations

import mmap
import time
from typing import Any

import direct

from kvferry.testing.memory import Bytes, CpuBuffer
from kvferry.testing.peer_process import PeerServer
from kvferry.testing.peers import Process

MESSAGE, DONE = b"x" * 64, b"y" * 64
"""A notification that is sent back, and one that is not."""

THREADS = 4
"""Of NIXL's UCX, as vLLM's own connector has it."""


class HugeBuffer(CpuBuffer):
    """In pages of 2 MiB where the kernel gives them on request, as numpy asks for them."""

    _advice = mmap.MADV_HUGEPAGE

    def __init__(self, nbytes: int) -> None:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(self._advice)
        self._map(memory)
        self._bytes[:] = 1  # touched, so that the kernel does not do it during the first read

    @property
    def view(self) -> Bytes:
        """Itself."""
        return self._bytes


class SmallBuffer(HugeBuffer):
    """In pages of 4 KiB, as malloc gives it where huge pages come only on request."""

    _advice = mmap.MADV_NOHUGEPAGE


PAGES = {"huge": HugeBuffer, "small": SmallBuffer}


class Echo(PeerServer):
    """Sends every notification back, as long as it is told to."""

    _agent: Any = None

    def echo(self, address: bytes, count: int) -> None:
        """By the driver."""
        peer = self.transport.connect(address)
        while count:
            self.turn()
            found = [one.payload for one in self.transport.notifications()]
            for payload in filter(MESSAGE.__eq__, found):
                self.transport.notify(peer, payload)
                count -= 1
            time.sleep(0)  # a driver's own thread needs the interpreter

    def nothing(self) -> None:
        """A call, and no more."""

    def agent(self, metadata: bytes) -> bytes:
        """Make an agent of NIXL that knows another one; what that one has to know of it."""
        self._agent = direct.bare(THREADS)
        self._known = self._agent.add_remote_agent(metadata).decode()
        found: bytes = self._agent.get_agent_metadata()
        return found

    def echo_direct(self, count: int) -> None:
        """By NIXL's own calls."""
        while count:
            for payload in self._agent.get_new_notifs().get(self._known, ()):
                self._agent.send_notif(self._known, payload)
                count -= 1
            time.sleep(0)


class Far(Process):
    """A process with a driver's transport."""

    def __init__(self, driver: str, memory: str, nbytes: int) -> None:
        arguments, factory = (
            {"name": driver, "options": {}},
            "kvferry.core.transport.registry:create",
        )
        super().__init__(factory, arguments, memory, nbytes, server="far:Echo", wait=False)

    def nothing(self) -> None:
        """A call there and back."""
        self.ask("nothing")

    def begin_echo(self, command: str, *arguments: object) -> None:
        """``echo`` or ``echo_direct``, which ``end_echo`` awaits."""
        self._connection.send((command, arguments))

    def end_echo(self) -> None:
        """Wait until it has sent them all back."""
        self._answer("echo", 60.0)
