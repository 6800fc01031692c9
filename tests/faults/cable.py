"""Between two engines: a driver to which things happen at a stage, and a cable that fails."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from kvferry.core.errors import ConnectError, PeerLostError, TransferCancelledError
from kvferry.core.messages import Release, decode_notes
from kvferry.core.transport import PeerId, State, Status, TransferId, Transport
from kvferry.core.transport.copies import Copies
from kvferry.core.transport.registry import load
from kvferry.drivers.loopback import LoopbackTransport

Way = Literal["questions", "answers"]
WAYS: frozenset[Way] = frozenset({"questions", "answers"})
PENDING = Status(state=State.PENDING)


def is_words(copies: Copies) -> bool:
    """Whether a read is of slot words."""
    return copies.total == 8 * len(copies)


def is_fence(notify: bytes | None) -> bool:
    """Whether a read says that something is done."""
    return notify is not None and isinstance(decode_notes(notify)[0], Release)


class Staged(Transport):
    """Does what it is told, once, at a stage of a load; for drivers to inherit first."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.at: dict[str, Callable[[], None]] = {}
        self.words = 0
        """Reads of slot words so far."""
        self._fences: set[TransferId] = set()

    def connect(self, address: bytes) -> PeerId:
        self._act("during the handshake")
        return super().connect(address)  # type: ignore[safe-super]

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        self.words += is_words(copies)
        fences = is_fence(notify)
        if fences or not is_words(copies):
            self._act("fencing" if fences else "reading")
        transfer = super().read(peer, copies, notify)
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
class _Late:
    """A read that waits, or that has ended without anybody hearing of it."""

    peer: PeerId
    stage: str
    due: float
    begin: Callable[[], TransferId]
    inner: TransferId | None = None
    ended: Status | None = None


class Wire(LoopbackTransport):
    """Loopback over a cable: what cannot go now waits, and goes when it can."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cut = False
        """Nothing moves."""
        self.is_noisy = False
        """What it says to peers is noise."""
        self.delay = 0.0
        """Seconds until a read goes."""
        self.held: frozenset[str] = frozenset()
        """Stages at which reads wait."""
        self._late: dict[TransferId, _Late] = {}
        self._random = random.Random(1)

    def mend(self) -> None:
        """All is well again."""
        self.is_cut, self.is_noisy, self.delay, self.held = False, False, 0.0, frozenset()

    def connect(self, address: bytes) -> PeerId:
        if self.is_cut:
            raise ConnectError("the cable is cut")
        return super().connect(address)

    def notify(self, peer: PeerId, payload: bytes) -> None:
        if not self.is_cut:
            super().notify(peer, self._said(payload) or b"")

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        stage = "fencing" if is_fence(notify) else "words" if is_words(copies) else "reading"
        said = self._said(notify)
        kept = replace(
            copies,
            local=copies.local.copy(),
            remote=copies.remote.copy(),
            nbytes=copies.nbytes.copy(),
        )
        transfer = TransferId(-1 - len(self._late))
        self._late[transfer] = _Late(
            peer=peer,
            stage=stage,
            due=time.monotonic() + self.delay,
            begin=lambda: super(Wire, self).read(peer, kept, said),
        )
        self._begin(self._late[transfer])
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        for transfer in transfers:
            self._begin(self._late[transfer])
        return [self._status(self._late[transfer]) for transfer in transfers]

    def cancel(self, transfer: TransferId) -> None:
        late = self._late[transfer]
        if late.inner is not None:
            super().cancel(late.inner)
        elif late.ended is None:
            late.ended = Status(state=State.FAILED, error=TransferCancelledError("cancelled"))

    def disconnect(self, peer: PeerId) -> None:
        for late in self._late.values():
            if late.peer == peer and late.inner is None and late.ended is None:
                late.ended = Status(state=State.FAILED, error=PeerLostError("disconnected"))
        super().disconnect(peer)

    def forget(self, transfer: TransferId) -> None:
        """The record stays, so that no number is used twice."""
        late = self._late[transfer]
        if late.inner is not None:
            super().forget(late.inner)

    def _begin(self, late: _Late) -> None:
        waits = self.is_cut or late.stage in self.held or time.monotonic() < late.due
        if late.inner is None and late.ended is None and not waits:
            late.inner = late.begin()

    def _status(self, late: _Late) -> Status:
        if late.ended is not None:
            return late.ended
        if late.inner is None or (late.stage == "fencing" and "finishing" in self.held):
            return PENDING
        return super().poll([late.inner])[0]

    def _said(self, payload: bytes | None) -> bytes | None:
        noisy = self.is_noisy and payload is not None
        return self._random.randbytes(len(payload or b"")) if noisy else payload


class Cable(Staged, Wire):
    """Both."""


def staged(
    driver: str = "loopback", settings: Mapping[str, object] = MappingProxyType({})
) -> Staged:
    """A driver to which things happen at a stage; ``settings`` are its own."""
    kind = load(driver)
    made: Staged = type(f"Staged{kind.__name__}", (Staged, kind), {})(**settings)
    return made


class Channel:
    """A side channel as seen over a cable: a proxy, which can be cut, slow or noisy either way."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.delay = 0.0
        """Seconds for which each piece of an answer is under way."""
        self.noisy: frozenset[Way] = frozenset()
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._cut: frozenset[Way] = frozenset()
        self._target = host, port
        self._random = random.Random(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, ways: frozenset[Way] = WAYS) -> None:
        """What is said waits from now on, as it does in a kernel that gets no acknowledgement."""
        with self._changed:
            self._cut = ways
            self._changed.notify_all()

    def mend(self) -> None:
        """All is well again, and what has waited goes on."""
        self.delay, self.noisy = 0.0, frozenset()
        self.cut(frozenset())

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone does not wake `accept`
        self._listener.close()
        self.mend()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while not self._closed.is_set():
                near, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, suppress(OSError), socket.create_connection(self._target) as far:
            ends = ((near, far, "questions"), (far, near, "answers"))
            threads = [threading.Thread(target=self._pump, args=end, daemon=True) for end in ends]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _pump(self, source: socket.socket, sink: socket.socket, way: Way) -> None:
        with suppress(OSError):  # one of the two hung up
            while data := source.recv(1 << 16):
                if way == "answers" and self.delay:
                    self._closed.wait(self.delay)
                with self._changed:
                    self._changed.wait_for(lambda: way not in self._cut)
                sink.sendall(self._random.randbytes(len(data)) if way in self.noisy else data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
            source.shutdown(socket.SHUT_RDWR)


def pester(port: int) -> None:
    """Strangers at the side channel."""
    noise = random.Random(port)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(noise.randbytes(noise.randrange(1, 2000)))
