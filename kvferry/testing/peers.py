"""Peers of the transport under test, each in its own process, which tests can kill and stop."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Self

from kvferry.core.memory import Region
from kvferry.core.transport import Notification, PeerId, Status
from kvferry.core.transport.copies import Copies
from kvferry.testing.memory import pattern
from kvferry.testing.peer_process import LocalPeer, PeerProcessError, PeerSetup

_ANSWER_SECONDS = 60.0
_TURN_SECONDS = 0.002
_KILL_SECONDS = 0.1
_MAIN = "from kvferry.testing.peer_process import main; main()"


class Process:
    """A peer in a process of its own, with a transport that ``factory`` makes and a buffer.

    It has the methods of ``LocalPeer`` and of its ``server``, a ``PeerServer``: each sends a
    command to that process, and waits for the answer; ``meanwhile``, if set, is called to poll the
    transports of this process. ``memory`` and ``seed`` are as for ``kvferry.testing.memory``.
    ``killed_at`` is when ``kill`` was called, by ``time.monotonic``. The process ends with this
    one; Ctrl-C in a terminal is for this one only.

    Raises:
        KVFerryError: The process has neither transport nor buffer, for this reason.
        PeerProcessError: The process ended at once; its stderr says why.
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
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                process_group=0,
            )
        self.killed_at = 0.0
        self.meanwhile: Callable[[], object] | None = None
        self.patience = 20.0
        self._connection = Connection(ours.detach())
        self._connection.send(PeerSetup(server, factory, dict(options), memory, nbytes, seed))
        self.content = pattern(nbytes, seed)
        self.name: str
        self.region: Region
        try:
            self.name, self.region = self._answer("start")
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill the process, even a stopped one, wait for its end, and close the connection."""
        self.process.kill()
        self.process.wait()
        self._connection.close()

    def kill(self) -> None:
        """Send SIGKILL and wait for the end of the process."""
        self.process.kill()
        self.killed_at = time.monotonic()
        self.process.wait()

    @contextlib.contextmanager
    def killed_soon(self) -> Iterator[None]:
        """Kill the process 0.1 s after the context has begun, or when the context ends."""
        timer = threading.Timer(_KILL_SECONDS, self.kill)
        timer.start()
        try:
            yield
        finally:
            timer.join()

    def stop(self) -> None:
        """Send SIGSTOP, and wait until the process is stopped (suspended) or has ended."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        """Send SIGCONT, so that a stopped process continues."""
        self.process.send_signal(signal.SIGCONT)

    # The methods of a ``PeerServer``, whose subclasses have further ones.
    def __getattr__(self, command: str) -> Callable[..., Any]:
        return partial(self.ask, command)

    def notifications(self, count: int, seconds: float | None = None) -> list[Notification]:
        """Wait for notifications, and return them; see ``LocalPeer.notifications``."""
        limit = self.patience if seconds is None else seconds
        found: list[Notification] = self.ask("notifications", count, limit)
        return found

    def begin(self, peer: PeerId, copies: Copies, seconds: float = 20.0) -> None:
        """Let this peer's transport start a read; call ``ended`` to wait for its status."""
        self.tell("read", peer, copies, seconds)

    def answered(self) -> bool:
        """Return whether the answer to ``begin`` or ``tell`` has arrived."""
        return self._connection.poll(0)

    def ended(self) -> Status:
        """Return the status of ``begin``'s transfer: PENDING only if its ``seconds`` are over."""
        status: Status = self._answer("read")
        return status

    # The answers are what the methods of ``PeerServer`` return, so their types differ.
    def ask(self, command: str, *args: object, seconds: float = _ANSWER_SECONDS) -> Any:  # noqa: ANN401
        """Execute a method of the ``PeerServer`` in the peer's process, and return its result."""
        self.tell(command, *args)
        return self._answer(command, seconds)

    def tell(self, command: str, *args: object) -> None:
        """Let the peer's process execute a method of ``PeerServer``; do not wait for the result."""
        self._connection.send((command, args))

    def _answer(self, command: str, seconds: float = _ANSWER_SECONDS) -> Any:  # noqa: ANN401
        deadline = time.monotonic() + seconds
        while not self._connection.poll(_TURN_SECONDS if self.meanwhile else seconds):
            if time.monotonic() >= deadline:
                raise PeerProcessError(
                    f"a second process has not answered {command} in {seconds} s"
                )
            if self.meanwhile is not None:
                self.meanwhile()
        try:
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError) as exc:
            raise PeerProcessError(
                f"a second process ended with status {self.process.wait()} during {command}; "
                "what it wrote to stderr says why"
            ) from exc
        if isinstance(answer, Exception):
            raise answer
        return answer


TransportPeer = LocalPeer | Process
"""A peer of the transport under test: a transport with one registered buffer."""
