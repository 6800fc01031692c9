"""The far end of ``Process``: a process with one transport and one buffer, that obeys its parent.

It keeps its hands off the transport between commands where the driver says that peers are served
without calls (``background_progress``), and polls it where the driver says that they are not.
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
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from kvferry.core.errors import KVFerryError, TransportUsageError
from kvferry.core.memory import Region
from kvferry.core.transport import PeerId, State, Status, TransferId, Transport
from kvferry.core.transport.copies import Copies
from kvferry.testing.memory import Bytes, allocate, imported, pattern

_TURN_SECONDS = 0.002
_STAY_SECONDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """What a peer is made of; sent as the first message."""

    server: str
    factory: str
    options: dict[str, object]
    memory: str
    nbytes: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A notification, and the first byte of the receiver's buffer when it was seen."""

    sender: str
    payload: bytes
    first: int


class PeerServer:
    """Each public method is a command."""

    def __init__(self, orders: Commands) -> None:
        self.buffer = allocate(orders.memory, orders.nbytes)
        self._content = pattern(orders.nbytes, orders.seed)
        self.buffer.put(self._content)
        self.transport: Transport = imported(orders.factory)(**orders.options)
        self.transport.register(self.buffer.region)
        self.region = self.buffer.region

    def address(self) -> bytes:
        return self.transport.address()

    def reset(self) -> None:
        """Begin anew: the first content, and nothing heard."""
        self.buffer.put(self._content)
        self.turn()
        while self.transport.notifications():
            time.sleep(_TURN_SECONDS)
            self.turn()

    def get(self) -> bytes:
        return self.buffer.get().tobytes()

    def put(self, data: Bytes) -> None:
        self.buffer.put(data)

    def register(self, region: Region) -> None:
        self.transport.register(region)

    def deregister(self, region: Region) -> None:
        self.transport.deregister(region)

    def notifications(self, count: int, seconds: float) -> list[Seen]:
        """Wait until so many have arrived, or the time is up."""
        found: list[Seen] = []
        deadline = time.monotonic() + seconds
        while len(found) < count and time.monotonic() < deadline:
            self.turn()
            arrived = self.transport.notifications()
            first = int(self.buffer.get(0, 1)[0]) if arrived else 0
            found += [Seen(sender=n.sender, payload=n.payload, first=first) for n in arrived]
            time.sleep(0.0005)
        return found

    def connect(self, address: bytes) -> PeerId:
        return self.transport.connect(address)

    def notify(self, peer: PeerId, payloads: list[bytes]) -> None:
        for payload in payloads:
            self.transport.notify(peer, payload)

    def start(self, op: str, peer: PeerId, copies: Copies, seconds: float) -> Status:
        """Run a transfer of this side's to its end, or until the time is up."""
        transfer = getattr(self.transport, op)(peer, copies)
        deadline = time.monotonic() + seconds
        while True:
            (status,) = self.transport.poll([transfer])
            if status.state is not State.PENDING or time.monotonic() > deadline:
                return status
            time.sleep(0.0005)

    def fork(self, peer: PeerId, copies: Copies) -> list[str]:
        """What a forked child could do with the transport that it should not have been able to."""
        get, put = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that threads and fork do not mix is what this tests
            child = os.fork()
        if child == 0:
            os.write(put, "\n".join(self._in_a_fork(peer, copies)).encode())
            os._exit(0)
        os.close(put)
        with os.fdopen(get, "rb") as said:
            wrong = said.read().decode()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return [line for line in wrong.splitlines() if line] + [f"ended with {code}"] * bool(code)

    def fork_and_stay(self) -> int:
        """A child that holds all that a fork inherits, and does nothing; its pid."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            # Whoever started this process kills the child; if that one is killed itself, the clock.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_STAY_SECONDS)
            while True:
                signal.pause()
        return child

    def _in_a_fork(self, peer: PeerId, copies: Copies) -> list[str]:
        wrong = self._not_refused(peer, copies)
        try:
            self.transport.close()
        except Exception as exc:  # noqa: BLE001 - likewise
            wrong.append(f"close raised {exc!r}")
        # Nor may it harm the parent that nothing refers to it any more.
        del self.transport
        gc.collect()
        return wrong

    def _not_refused(self, peer: PeerId, copies: Copies) -> list[str]:
        wrong = []
        for name, call in calls(self.transport, self.region, peer, copies).items():
            try:
                call()
            except TransportUsageError:
                continue
            # Whatever it is, the parent gets to know.
            except Exception as exc:  # noqa: BLE001
                wrong.append(f"{name} raised {exc!r}, not TransportUsageError")
            else:
                wrong.append(f"{name} was not refused")
        return wrong

    def close(self) -> None:
        self.transport.close()

    def turn(self) -> None:
        """Let a transport without threads of its own go on."""
        if not self.transport.capabilities.background_progress:
            self.transport.poll([])


def calls(
    transport: Transport, region: Region, peer: PeerId, copies: Copies
) -> dict[str, Callable[[], object]]:
    """A call of every method that refuses once a transport is closed, or is a fork's."""
    can = transport.capabilities
    sends = {"notify": lambda: transport.notify(peer, b"x")} if can.max_notification else {}
    ops = {op: partial(getattr(transport, op), peer, copies) for op in can.ops}
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
        **sends,
        **ops,
    }


def serve(connection: Connection) -> None:
    """Obey until the parent is gone. An error is an answer, too."""
    orders: Commands = connection.recv()
    server: PeerServer = imported(orders.server)(orders)
    connection.send((True, (server.transport.name, server.region)))
    closed = False
    while True:
        try:
            while not connection.poll(None if closed else _turn_seconds(server)):
                server.turn()
            command, args = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        connection.send(_answer(server, command, args))
        closed |= command == "close"


def _turn_seconds(server: PeerServer) -> float | None:
    return None if server.transport.capabilities.background_progress else _TURN_SECONDS


def _answer(server: PeerServer, command: str, args: tuple[Any, ...]) -> tuple[bool, object]:
    try:
        return True, getattr(server, command)(*args)
    except KVFerryError as exc:
        return False, exc
    # The parent raises it again, with what is needed to find it.
    except Exception:  # noqa: BLE001
        return False, RuntimeError(traceback.format_exc())


def main() -> None:
    """Serve the connection whose descriptor is the first argument; never returns."""
    try:
        serve(Connection(int(sys.argv[1])))
    except BaseException:  # noqa: BLE001 - said, and then the process ends
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Some transport libraries crash in their own exit handlers, long after all work.
    os._exit(0)
