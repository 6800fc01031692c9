"""A producer's death in the middle of a read, met inside the decode engine's process.

Functions that take an ``LLMEngine`` are for `engines.Engine.run`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.engines import ranks

if TYPE_CHECKING:
    from kvferry.core.transport import PeerId, Status, TransferId
    from kvferry.core.transport.copies import Copies

ROUNDS = 10_000
"""How often a read copies its pages: a second or so of 40,000 copies, as a long prompt's."""

SENTINEL = 0x7FF8_DEAD_7FF8_BEEF
"""What no cache holds: a page that has it is one that no byte has reached."""

WATCH_SECONDS = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A producer, by its processes, and by the addresses of its ranks."""

    pids: list[int]
    addresses: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What decode knew when, in seconds from the kill."""

    known: float  # the driver told the endpoint that the read fails
    over: float  # no byte could land any more, so that a line said that the load had failed
    error: str  # the driver's
    connections: int  # how many to the victim are left
    healthy: bool  # what the endpoint says of itself


def victim(engine: Any) -> Victim:
    return Victim(
        pids=sorted({os.getpid(), *ranks.pids(engine)}), addresses=ranks.addresses(engine)
    )


def kill_in_the_middle(engine: Any, victim: Victim) -> None:
    """From now on reads of the victim's pages last, and the first byte that lands kills it."""
    _Death.latest = _Death(victim, ranks.endpoint())


def course(engine: Any) -> Course:
    """Of the latest death."""
    return _Death.latest.course()


class _Death(logging.Handler):
    """Stands between an endpoint and its transport, and listens to the endpoint's log."""

    latest: _Death

    def __init__(self, victim: Victim, endpoint: Any) -> None:
        super().__init__(logging.WARNING)
        self._victim = victim
        self._endpoint = endpoint
        self._peers: set[PeerId] = set()
        self._watching = False
        self._killed = self._known = self._over = 0.0
        self._error = ""
        self._transport = endpoint._transport
        for name in ("connect", "disconnect", "read", "poll"):
            setattr(self._transport, name, getattr(self, name))
        logging.getLogger("kvferry.core.endpoint").addHandler(self)

    def course(self) -> Course:
        return Course(
            known=self._known - self._killed,
            over=self._over - self._killed,
            error=self._error,
            connections=len(self._peers),
            healthy=self._endpoint.healthy,
        )

    # In place of the transport's.

    def connect(self, address: bytes) -> PeerId:
        peer: PeerId = self._real("connect", address)
        if address in self._victim.addresses:
            self._peers.add(peer)
        return peer

    def disconnect(self, peer: PeerId) -> None:
        self._real("disconnect", peer)
        self._peers.discard(peer)

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        if peer in self._peers and copies.total > 8 * len(copies):  # no words
            self._watch(int(copies.local[copies.remote.argmin()]))
            copies = _repeated(copies)
        transfer: TransferId = self._real("read", peer, copies, notify)
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        statuses: list[Status] = self._real("poll", transfers)
        for status in statuses:
            if status.error is not None and not self._known:
                self._known, self._error = time.monotonic(), str(status.error)
        return statuses

    # In place of a log's handler's.

    def emit(self, record: logging.LogRecord) -> None:
        if "not loaded" in record.getMessage() and not self._over:
            self._over = time.monotonic()

    def _real(self, name: str, *arguments: Any) -> Any:
        return getattr(type(self._transport), name)(self._transport, *arguments)

    def _watch(self, address: int) -> None:
        if self._watching:
            return
        self._watching = True
        word = ctypes.c_uint64.from_address(address)
        word.value = SENTINEL

        def wait() -> None:
            while word.value == SENTINEL:
                time.sleep(WATCH_SECONDS)
            self._killed = time.monotonic()
            for pid in self._victim.pids:
                os.kill(pid, signal.SIGKILL)

        threading.Thread(target=wait, daemon=True).start()


def _repeated(copies: Copies) -> Copies:
    from kvferry.core.transport.copies import Copies, Segment

    segments = [
        Segment(
            start=ROUNDS * cut.start,
            stop=ROUNDS * cut.stop,
            local=cut.local,
            remote=cut.remote,
        )
        for cut in copies.segments
    ]
    parts = [slice(cut.start, cut.stop) for cut in copies.segments]

    def tiled(array: np.ndarray[Any, np.dtype[np.uint64]]) -> Any:
        return np.concatenate([np.tile(array[part], ROUNDS) for part in parts])

    return Copies(
        local=tiled(copies.local),
        remote=tiled(copies.remote),
        nbytes=tiled(copies.nbytes),
        segments=tuple(segments),
    )
