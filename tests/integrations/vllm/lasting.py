"""Reads that last, inside an engine's process (`engines.Engine.run`), so that one can be met."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kvferry.core.copies import Copies
    from kvferry.core.transport import PeerId, TransferId
    from kvferry.drivers.nixl import NixlTransport

ROUNDS = 40_000
"""Together with the 40 or so copies of a prompt, some seconds."""


def prolong_reads(engine: Any, reached: str) -> None:
    """From now on a read of pages copies them again and again.

    ``reached`` is a file that appears when bytes of such a read have landed.
    """
    from kvferry.drivers.nixl import NixlTransport

    original = NixlTransport.read

    def read(
        self: NixlTransport, peer: PeerId, copies: Copies, notify: bytes | None = None
    ) -> TransferId:
        if copies.total <= 8 * len(copies):
            return original(self, peer, copies, notify)
        _watch(int(copies.local[0]), reached)
        return original(self, peer, _repeated(copies), notify)

    NixlTransport.read = read  # type: ignore[method-assign]


def _repeated(copies: Copies) -> Copies:
    from kvferry.core.copies import Copies, Segment

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


def _watch(address: int, reached: str) -> None:
    word = ctypes.c_uint64.from_address(address)
    # What no cache has there, until the first byte of the producer's page arrives.
    word.value = before = 0x7FF8_DEAD_7FF8_BEEF

    def wait() -> None:
        while word.value == before:
            time.sleep(0.001)
        Path(reached).touch()

    threading.Thread(target=wait, daemon=True).start()
