"""Faults between two engines: drivers that call a function at a stage, and links that fail."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from kvferry.core.errors import ConnectError, PeerLostError, TransferCancelledError
from kvferry.core.messages import Release, decode_notes
from kvferry.core.transport import PeerId, State, Status, TransferId, Transport
from kvferry.core.transport.copies import Copies
from kvferry.core.transport.registry import load
from kvferry.drivers.loopback import LoopbackTransport

Direction = Literal["requests", "replies"]
DIRECTIONS: frozenset[Direction] = frozenset({"requests", "replies"})
PENDING = Status(state=State.PENDING)
STAGES = ("before the handshake", "during the handshake", "reading", "fencing", "finishing")
"""The stages of a load. Finishing: the fence is final, and not yet reported to the engine."""
OVER = os.environ.get("KVFERRY_FAULTS_OVER", "loopback")
"""The driver of the tests in this run. A process should not load both NIXL's UCX and another."""


def is_slot_read(copies: Copies) -> bool:
    return copies.total == 8 * len(copies)


def is_fence(notify: bytes | None) -> bool:
    """Return whether a read has a release bound to it, and so is a fence."""
    return notify is not None and isinstance(decode_notes(notify)[0], Release)


class StagedTransport(Transport):
    """A mixin for drivers: calls a function, once, when a load reaches a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.at: dict[str, Callable[[], object]] = {}
        """What to call, by stage."""
        self.slot_reads = 0
        """The number of reads of slot words so far."""
        self._fences: set[TransferId] = set()

    def connect(self, address: bytes) -> PeerId:
        self._act("during the handshake")
        return super().connect(address)  # type: ignore[safe-super]

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        self.slot_reads += is_slot_read(copies)
        fences = is_fence(notify)
        if fences or not is_slot_read(copies):
            self._act("fencing" if fences else "reading")
        transfer = super().read(peer, copies, notify)  # type: ignore[safe-super]
        if fences:
            self._fences.add(transfer)
        return transfer

    def forget(self, transfer: TransferId) -> None:
        super().forget(transfer)  # type: ignore[safe-super]
        if transfer in self._fences:
            self._fences.discard(transfer)
            self._act("finishing")

    def _act(self, stage: str) -> None:
        act = self.at.pop(stage, None)
        if act is not None:
            act()


@dataclass(slots=True, kw_only=True, eq=False)
class _DelayedRead:
    """A read that may wait before it starts, or before its end is reported."""

    peer: PeerId
    stage: str
    due: float
    begin: Callable[[], TransferId]
    inner: TransferId | None = None
    ended: Status | None = None


class CableTransport(LoopbackTransport):
    """Loopback over a simulated cable: reads wait while the cable is cut or slow."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cut = False
        """Whether reads wait, connections fail, and notifications are lost."""
        self.is_noisy = False
        """Whether notifications carry random bytes."""
        self.delay = 0.0
        """Seconds until a read starts."""
        self.held: frozenset[str] = frozenset()
        """Stages whose reads wait."""
        self._reads: dict[TransferId, _DelayedRead] = {}
        self._random = random.Random(1)

    def mend(self) -> None:
        self.is_cut, self.is_noisy, self.delay, self.held = False, False, 0.0, frozenset()

    def connect(self, address: bytes) -> PeerId:
        if self.is_cut:
            raise ConnectError("the cable is cut")
        return super().connect(address)

    def notify(self, peer: PeerId, payload: bytes) -> None:
        if not self.is_cut:
            super().notify(peer, self._payload(payload) or b"")

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        stage = "fencing" if is_fence(notify) else "words" if is_slot_read(copies) else "reading"
        said = self._payload(notify)
        kept = replace(
            copies,
            local=copies.local.copy(),
            remote=copies.remote.copy(),
            nbytes=copies.nbytes.copy(),
        )
        transfer = TransferId(-1 - len(self._reads))
        self._reads[transfer] = _DelayedRead(
            peer=peer,
            stage=stage,
            due=time.monotonic() + self.delay,
            begin=lambda: super(CableTransport, self).read(peer, kept, said),
        )
        self._begin(self._reads[transfer])
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        for transfer in transfers:
            self._begin(self._reads[transfer])
        return [self._status(self._reads[transfer]) for transfer in transfers]

    def cancel(self, transfer: TransferId) -> None:
        delayed = self._reads[transfer]
        if delayed.inner is not None:
            super().cancel(delayed.inner)
        elif delayed.ended is None:
            delayed.ended = Status(state=State.FAILED, error=TransferCancelledError("cancelled"))

    def disconnect(self, peer: PeerId) -> None:
        for delayed in self._reads.values():
            if delayed.peer == peer and delayed.inner is None and delayed.ended is None:
                delayed.ended = Status(state=State.FAILED, error=PeerLostError("disconnected"))
        super().disconnect(peer)

    def forget(self, transfer: TransferId) -> None:
        """Forget a transfer, but keep its record, so that no id is used twice."""
        delayed = self._reads[transfer]
        if delayed.inner is not None:
            super().forget(delayed.inner)

    def _begin(self, delayed: _DelayedRead) -> None:
        waits = self.is_cut or delayed.stage in self.held or time.monotonic() < delayed.due
        if delayed.inner is None and delayed.ended is None and not waits:
            delayed.inner = delayed.begin()

    def _status(self, delayed: _DelayedRead) -> Status:
        if delayed.ended is not None:
            return delayed.ended
        if delayed.inner is None or (delayed.stage == "fencing" and "finishing" in self.held):
            return PENDING
        return super().poll([delayed.inner])[0]

    def _payload(self, payload: bytes | None) -> bytes | None:
        noisy = self.is_noisy and payload is not None
        return self._random.randbytes(len(payload or b"")) if noisy else payload


class StagedCable(StagedTransport, CableTransport):
    """Loopback over a simulated cable that also calls functions at stages."""


def staged_transport(driver: str = "loopback") -> StagedTransport:
    """Make a driver that calls functions at stages."""
    kind = load(driver)
    made: StagedTransport = type(f"Staged{kind.__name__}", (StagedTransport, kind), {})()
    return made


class Channel:
    """A proxy in front of a side channel that can be cut, slow or noisy in either direction."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.delay = 0.0
        """Seconds by which every piece of a reply is delayed."""
        self.noisy: frozenset[Direction] = frozenset()
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._cut: frozenset[Direction] = frozenset()
        self._target = host, port
        self._random = random.Random(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, directions: frozenset[Direction] = DIRECTIONS) -> None:
        """Hold data back from now on, as a kernel does that gets no acknowledgement."""
        with self._changed:
            self._cut = directions
            self._changed.notify_all()

    def mend(self) -> None:
        self.delay, self.noisy = 0.0, frozenset()
        self.cut(frozenset())

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # close alone does not wake `accept`
        self._listener.close()
        self.mend()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while not self._closed.is_set():
                near, _ = self._listener.accept()
                threading.Thread(target=self._forward, args=(near,), daemon=True).start()

    def _forward(self, near: socket.socket) -> None:
        with near, suppress(OSError), socket.create_connection(self._target) as far:
            ends = ((near, far, "requests"), (far, near, "replies"))
            threads = [
                threading.Thread(target=self._copy_stream, args=end, daemon=True) for end in ends
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _copy_stream(
        self, source: socket.socket, sink: socket.socket, direction: Direction
    ) -> None:
        with suppress(OSError):  # one end has closed the connection
            while data := source.recv(1 << 16):
                if direction == "replies" and self.delay:
                    self._closed.wait(self.delay)
                with self._changed:
                    self._changed.wait_for(lambda: direction not in self._cut)
                sink.sendall(self._random.randbytes(len(data)) if direction in self.noisy else data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
            source.shutdown(socket.SHUT_RDWR)


def pester(port: int) -> None:
    noise = random.Random(port)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(noise.randbytes(noise.randrange(1, 2000)))
