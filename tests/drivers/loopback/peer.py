"""A peer in a process of its own: a transport, a buffer, and a loop that obeys its parent.

Run as a script it speaks JSON lines on stdin and stdout; ``Peer`` is the parent's end.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvferry.core.memory import Region
from kvferry.drivers.loopback import LoopbackTransport

Bytes = npt.NDArray[np.uint8]


def pattern(nbytes: int, seed: int) -> Bytes:
    """Bytes that tell their place."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


class Peer:
    """Starts the process; each method is one command to it."""

    def __init__(self, nbytes: int = 1 << 20, seed: int = 1) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(nbytes), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        hello = self.answer()
        self.region = Region(address=hello["base"], nbytes=nbytes)
        self.content = pattern(nbytes, seed)
        self.name: str = hello["name"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def address(self) -> bytes:
        """Its transport's address."""
        return bytes.fromhex(self.ask("address"))

    def bytes_at(self, offset: int, nbytes: int) -> bytes:
        """What its buffer holds, as it sees it itself."""
        return bytes.fromhex(self.ask("bytes_at", offset, nbytes))

    def notifications(self, count: int) -> list[tuple[str, bytes, int]]:
        """Wait for so many: sender, payload, and the buffer's first byte when each was seen."""
        found = self.ask("notifications", count)
        return [(sender, bytes.fromhex(payload), first) for sender, payload, first in found]

    def ask(self, command: str, *args: object) -> Any:
        """Send a command and wait for its answer."""
        self.tell(command, *args)
        return self.answer()

    def tell(self, command: str, *args: object) -> None:
        """Send a command."""
        stream = self.process.stdin
        if stream is None:
            raise RuntimeError("no pipe")
        stream.write(json.dumps([command, *args]) + "\n")
        stream.flush()

    def answer(self) -> Any:
        """What the last command gives, once it is there."""
        stream = self.process.stdout
        if stream is None:
            raise RuntimeError("no pipe")
        return json.loads(stream.readline())


class _Served:
    """The child's end."""

    def __init__(self, nbytes: int, seed: int) -> None:
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._buffer: Bytes = np.frombuffer(self._memory, np.uint8)
        self._content = pattern(nbytes, seed)
        self.reset()
        self.base = int(self._buffer.ctypes.data)
        self.transport = LoopbackTransport()
        self.transport.register(Region(address=self.base, nbytes=nbytes))

    def address(self) -> str:
        return self.transport.address().hex()

    def reset(self) -> None:
        self._buffer[:] = self._content

    def bytes_at(self, offset: int, nbytes: int) -> str:
        return self._buffer[offset : offset + nbytes].tobytes().hex()

    def register(self, offset: int, nbytes: int) -> None:
        self.transport.register(Region(address=self.base + offset, nbytes=nbytes))

    def deregister(self, offset: int, nbytes: int) -> None:
        self.transport.deregister(Region(address=self.base + offset, nbytes=nbytes))

    def unmap(self, offset: int, nbytes: int) -> int:
        libc = ctypes.CDLL(None)
        return int(libc.munmap(ctypes.c_void_p(self.base + offset), ctypes.c_size_t(nbytes)))

    def notifications(self, count: int) -> list[tuple[str, str, int]]:
        found: list[tuple[str, str, int]] = []
        while len(found) < count:
            time.sleep(0.0005)
            for message in self.transport.notifications():
                found.append((message.sender, message.payload.hex(), int(self._buffer[0])))
        return found

    def send(self, address: str, count: int) -> None:
        peer = self.transport.connect(bytes.fromhex(address))
        for index in range(count):
            self.transport.notify(peer, b"%d" % index)

    def become(self, *command: str) -> None:
        os.execv(command[0], command)

    def close(self) -> None:
        self.transport.close()


def _main() -> None:
    served = _Served(int(sys.argv[1]), int(sys.argv[2]))
    _say({"base": served.base, "name": served.transport.name})
    for line in sys.stdin:
        command, *args = json.loads(line)
        _say(getattr(served, command)(*args))


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main()
