"""The child process of ``peers.Process``: has a transport and a buffer, and executes commands.

The parent process sends the commands. Between commands the child polls the transport, unless the
driver makes progress without calls (``background_progress``).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from kvferry.core.errors import KVFerryError, TransportUsageError
from kvferry.core.memory import Region
from kvferry.core.transport import Notification, PeerId, State, Status, TransferId, Transport
from kvferry.core.transport.copies import Copies
from kvferry.testing.memory import Buffer, Bytes, allocate, imported, make_transport, pattern

_TURN_SECONDS = 0.002
"""Seconds between two polls of a transport without ``background_progress``."""
_SLEEP_SECONDS = 0.0005
_STAY_SECONDS = 300
"""Seconds after which a forked child ends by itself, if the test has not killed it."""


class PeerProcessError(KVFerryError, RuntimeError):
    """A peer's process has ended, failed or not answered; the message says why."""


class PeerSetup(NamedTuple):
    """How to set up a peer's process: the first message that its parent, a ``Process``, sends."""

    server: str
    factory: str
    options: dict[str, object]
    memory: str
    nbytes: int
    seed: int


class LocalPeer:
    """A peer of the transport under test in this process: a transport and a registered buffer.

    ``turn`` is called while it waits, to poll transports that need calls to make progress. It waits
    ``patience`` seconds for notifications by default.
    """

    def __init__(
        self,
        transport: Transport,
        buffer: Buffer,
        content: Bytes,
        turn: Callable[[], object],
        patience: float = 20.0,
    ) -> None:
        self.transport, self.buffer, self.region = transport, buffer, buffer.region
        self.name = transport.name
        self._turn, self._patience = turn, patience
        buffer.put(content)
        transport.register(buffer.region)

    def address(self) -> bytes:
        """Return the address of the peer's transport."""
        return self.transport.address()

    def get(self) -> Bytes:
        """Return all bytes of the buffer, as the peer's own process sees them."""
        return self.buffer.get()

    def put(self, data: Bytes) -> None:
        """Overwrite the first bytes of the buffer."""
        self.buffer.put(data)

    def register(self, region: Region) -> None:
        """Register memory of the peer's process with the peer's transport."""
        self.transport.register(region)

    def deregister(self, region: Region) -> None:
        """Deregister memory from the peer's transport."""
        self.transport.deregister(region)

    def notifications(self, count: int, seconds: float | None = None) -> list[Notification]:
        """Return notifications once ``count`` have arrived, or when the time is up."""
        found: list[Notification] = []
        deadline = time.monotonic() + (self._patience if seconds is None else seconds)
        while len(found) < count and time.monotonic() < deadline:
            self._turn()
            found += self.transport.notifications()
            time.sleep(_SLEEP_SECONDS)
        return found


class PeerServer(LocalPeer):
    """Execute commands of the parent process. Each public method is a command."""

    def __init__(self, setup: PeerSetup) -> None:
        self._content = pattern(setup.nbytes, setup.seed)
        transport = make_transport(setup.factory, setup.options, setup.memory)
        buffer = allocate(setup.memory, setup.nbytes)
        super().__init__(transport, buffer, self._content, self.turn)

    def reset(self) -> None:
        """Restore the buffer's initial content, and drop the notifications that have arrived."""
        self.put(self._content)
        self.turn()
        while self.transport.notifications():
            time.sleep(_TURN_SECONDS)
            self.turn()

    def connect(self, address: bytes) -> PeerId:
        """Connect the transport to an address, and return the peer's id."""
        return self.transport.connect(address)

    def notify(self, peer: PeerId, payloads: list[bytes]) -> None:
        """Send notifications to a peer."""
        for payload in payloads:
            self.transport.notify(peer, payload)

    def read(self, peer: PeerId, copies: Copies, seconds: float) -> Status:
        """Start a read, and return its status when it is no longer PENDING, or time is up."""
        transfer = self.transport.read(peer, copies)
        deadline = time.monotonic() + seconds
        while True:
            (status,) = self.transport.poll([transfer])
            if status.state is not State.PENDING or time.monotonic() > deadline:
                return status
            time.sleep(_SLEEP_SECONDS)

    def fork(self, peer: PeerId, copies: Copies) -> list[str]:
        """Fork, call every method of the transport in the child, and return what was wrong.

        Every one but ``close`` must raise ``TransportUsageError``.
        """
        get, put = os.pipe()
        child = _forked(lambda: os.write(put, "\n".join(self._in_a_fork(peer, copies)).encode()))
        os.close(put)
        with os.fdopen(get, "rb") as said:
            wrong = said.read().decode()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return [line for line in wrong.splitlines() if line] + [f"ended with {code}"] * bool(code)

    def fork_and_stay(self) -> int:
        """Fork a child that keeps all inherited file descriptors until it is killed."""

        def stay() -> None:
            # The test kills the child. If the test is killed itself, the alarm ends the child.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_STAY_SECONDS)
            while True:
                signal.pause()

        return _forked(stay)

    def _in_a_fork(self, peer: PeerId, copies: Copies) -> list[str]:
        wrong = []
        for name, call in calls(self.transport, self.region, peer, copies).items():
            try:
                call()
                wrong.append(f"{name} was not refused")
            except TransportUsageError:
                pass
            except Exception as exc:  # noqa: BLE001 - reported to the parent
                wrong.append(f"{name} raised {exc!r}, not TransportUsageError")
        try:
            self.transport.close()
        except Exception as exc:  # noqa: BLE001 - reported to the parent
            wrong.append(f"close raised {exc!r}")
        # Garbage collection in the child must not harm the parent's transport either.
        del self.transport
        gc.collect()
        return wrong

    def close(self) -> None:
        """Close the transport."""
        self.transport.close()

    def turn(self) -> None:
        """Poll the transport if it needs calls to make progress."""
        if not self.transport.capabilities.background_progress:
            self.transport.poll([])


def _forked(run: Callable[[], object]) -> int:
    """Run this in a forked child, and end that; return its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Forking with threads is what this tests.
        child = os.fork()
    if child == 0:
        run()
        os._exit(0)
    return child


def calls(
    transport: Transport, region: Region, peer: PeerId, copies: Copies
) -> dict[str, Callable[[], object]]:
    """Return functions that call methods which must raise after ``close`` and in a forked child.

    ``notify`` is left out if the transport has no notifications.
    """
    notifies = transport.capabilities.max_notification > 0
    sends = {"notify": lambda: transport.notify(peer, b"x")} if notifies else {}
    return {
        "register": lambda: transport.register(region),
        "deregister": lambda: transport.deregister(region),
        "address": transport.address,
        "connect": lambda: transport.connect(b""),
        "poll": lambda: transport.poll([]),
        "forget": lambda: transport.forget(TransferId(1)),
        "cancel": lambda: transport.cancel(TransferId(1)),
        "notifications": transport.notifications,
        "disconnect": lambda: transport.disconnect(peer),
        "read": lambda: transport.read(peer, copies),
        **sends,
    }


def serve(connection: Connection) -> None:
    """Execute the parent's commands until it closes the connection; answer with their results."""
    setup: PeerSetup = connection.recv()
    server = _answer(imported(setup.server), (setup,))
    if isinstance(server, Exception):
        connection.send(server)
        return
    connection.send((server.transport.name, server.region))
    rests = server.transport.capabilities.background_progress
    while True:
        try:
            while not connection.poll(None if rests else _TURN_SECONDS):
                server.turn()
            command, args = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        connection.send(_answer(getattr(server, command), args))
        rests |= command == "close"


def _answer(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Return what a call returns, or raises, which the parent raises again."""
    try:
        return call(*args)
    except KVFerryError as exc:
        return exc
    except Exception:  # noqa: BLE001 - with this process's traceback
        return PeerProcessError(traceback.format_exc())


def main() -> None:
    """Serve the connection whose file descriptor the command line names; end the process."""
    try:
        serve(Connection(int(sys.argv[1])))
    except BaseException:  # noqa: BLE001 - printed, and the process ends
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Some transport libraries crash in their own exit handlers, long after all work.
    os._exit(0)
