"""Peers of the transport under test: in this process, or in one that can be killed and stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from kvferry.core.memory import Region
from kvferry.core.transport import PeerId, Status
from kvferry.core.transport.copies import Copies
from kvferry.testing.memory import Bytes, pattern
from kvferry.testing.peer_process import Commands, Seen

_START_SECONDS = 60.0
_TURN_SECONDS = 0.002
_MAIN = "from kvferry.testing.peer_process import main; main()"


class TransportPeer(Protocol):
    """A transport with one buffer, all of which it has registered."""

    @property
    def name(self) -> str: ...
    @property
    def region(self) -> Region: ...
    def address(self) -> bytes:
        """Its transport's address."""

    def get(self) -> Bytes:
        """Its buffer's bytes, as it sees them itself."""

    def put(self, data: Bytes) -> None:
        """Overwrite its buffer from the start."""

    def register(self, region: Region) -> None:
        """Register a part of its buffer."""

    def deregister(self, region: Region) -> None:
        """Deregister what was registered."""

    def notifications(self, count: int, seconds: float | None = None) -> list[Seen]:
        """Those that arrive until there are so many, or the time is up."""


class Process:
    """A peer in a process of its own. Each method is one command to it, but the signals.

    Args:
        factory: what makes its transport, and ``options``: its keyword arguments.
        memory: of which kind its buffer is.
        nbytes: how large that is.
        seed: of its content, ``kvferry.testing.memory.pattern``.
        server: the class that obeys there, for commands of one's own (by ``ask``).
        wait: whether it has started when this returns; if not, ``started`` waits.

    Attributes:
        meanwhile: called again and again while a command is obeyed, if it is set: for transports
            of this process that move nothing unless they are polled.
        patience: how many seconds it waits for notifications, by default.

    Raises:
        RuntimeError: the process ended at once; what it wrote to stderr says why.
    """

    def __init__(
        self,
        factory: str,
        options: Mapping[str, object],
        memory: str,
        nbytes: int,
        seed: int = 1,
        *,
        server: str = "kvferry.testing.peer_process:PeerServer",
        wait: bool = True,
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self.meanwhile: Callable[[], object] | None = None
        self.patience = 20.0
        self._connection = Connection(ours.detach())
        self._connection.send(
            Commands(
                server=server,
                factory=factory,
                options=dict(options),
                memory=memory,
                nbytes=nbytes,
                seed=seed,
            )
        )
        self.content = pattern(nbytes, seed)
        self.name: str
        self.region: Region
        if wait:
            self.started()

    def started(self) -> Self:
        """Wait until it has started.

        Raises:
            RuntimeError: it ended at once.
        """
        try:
            self.name, self.region = self._answer("start", _START_SECONDS)
        except BaseException:
            self.end()
            raise
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Kill it, in whatever state it is, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        self._connection.close()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped (or is gone)."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def address(self) -> bytes:
        address: bytes = self.ask("address")
        return address

    def reset(self) -> None:
        """Write its first content again, and drop the notifications that it has got."""
        self.ask("reset")

    def get(self) -> Bytes:
        return np.frombuffer(self.ask("get"), np.uint8)

    def put(self, data: Bytes) -> None:
        self.ask("put", data)

    def register(self, region: Region) -> None:
        self.ask("register", region)

    def deregister(self, region: Region) -> None:
        self.ask("deregister", region)

    def notifications(self, count: int, seconds: float | None = None) -> list[Seen]:
        self.expect(count, seconds)
        return self.expected()

    def expect(self, count: int, seconds: float | None = None) -> None:
        """Begin to wait for notifications; ``expected`` says what came of it."""
        limit = self.patience if seconds is None else seconds
        self._connection.send(("notifications", (count, limit)))

    def expected(self) -> list[Seen]:
        """What arrived since ``expect``."""
        found: list[Seen] = self._answer("notifications", 60.0)
        return found

    def connect(self, address: bytes) -> PeerId:
        """Let it connect."""
        peer: PeerId = self.ask("connect", address)
        return peer

    def notify(self, peer: PeerId, payloads: Sequence[bytes]) -> None:
        """Let it send."""
        self.ask("notify", peer, list(payloads))

    def begin(self, op: str, peer: PeerId, copies: Copies, seconds: float = 20.0) -> None:
        """Let it read or write; ``ended`` says what came of it."""
        self._connection.send(("start", (op, peer, copies, seconds)))

    def answered(self) -> bool:
        """Whether what was begun has ended."""
        return self._connection.poll(0)

    def ended(self) -> Status:
        """The outcome of what ``begin`` began."""
        status: Status = self._answer("start", 60.0)
        return status

    def fork(self, peer: PeerId, copies: Copies) -> list[str]:
        """Let it fork, and let the child use the transport; what went wrong there."""
        wrong: list[str] = self.ask("fork", peer, copies)
        return wrong

    def fork_and_stay(self) -> int:
        """Let it fork; the child, whose pid this is, does nothing until somebody kills it."""
        child: int = self.ask("fork_and_stay")
        return child

    def close(self) -> None:
        """Let it close its transport; the process lives on."""
        self.ask("close")

    # Answers are what the commands of ``PeerServer`` return; each method says its type.
    def ask(self, command: str, *args: object) -> Any:  # noqa: ANN401
        """Let it obey a command: a method of its server."""
        self.tell(command, *args)
        return self._answer(command, 60.0)

    def tell(self, command: str, *args: object) -> None:
        """Send a command that does not answer."""
        self._connection.send((command, args))

    def _answer(self, command: str, seconds: float) -> Any:  # noqa: ANN401
        good, answer = False, None
        with contextlib.suppress(EOFError, ConnectionResetError):
            if not self._arrives(seconds):
                raise TimeoutError(f"the peer's process has not answered {command} in {seconds} s")
            good, answer = self._connection.recv()
        if good:
            return answer
        if isinstance(answer, BaseException):
            raise answer
        raise RuntimeError(
            f"the peer's process ended with status {self.process.wait()} during {command}; what it "
            "wrote to stderr says why"
        )

    def _arrives(self, seconds: float) -> bool:
        if self.meanwhile is None:
            return self._connection.poll(seconds)
        deadline = time.monotonic() + seconds
        while not self._connection.poll(_TURN_SECONDS):
            if time.monotonic() > deadline:
                return False
            self.meanwhile()
        return True


class Spares:
    """Processes for one use each: from the second on, the next one starts while one is used."""

    def __init__(self, make: Callable[[], Process]) -> None:
        self._make = make
        self._next: Process | None = None
        self._taken = 0

    def take(self) -> Process:
        """One that has started; its user ends it."""
        taken = self._next or self._make()
        self._taken += 1
        self._next = self._make() if self._taken > 1 else None
        return taken.started()

    def end(self) -> None:
        """Kill the one that is left."""
        if self._next is not None:
            self._next.end()
