"""A transport without cost."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

from kvferry.core.memory import Region
from kvferry.core.messages import WORD_BYTES
from kvferry.core.transport import (
    Capabilities,
    Notification,
    PeerId,
    Quiescence,
    State,
    Status,
    TransferId,
    Transport,
)
from kvferry.core.transport.copies import Copies

WORD = 77 << 1 | 1
"""The slot word of a hold of generation 77 that is ready: what each read of a word finds."""


class NoTransport(Transport):
    """Moves no data, at no cost; every address is another peer."""

    interface_version = (2, 0)
    name = "nothing"
    capabilities = Capabilities(
        memory=frozenset({"cpu"}),
        max_notification=1 << 14,
        cancel=False,
        background_progress=True,
        quiescence=Quiescence.ALWAYS,
    )

    def __init__(self, *, pending: bool = False) -> None:
        self._pages = Status(state=State.PENDING if pending else State.DONE)
        self._statuses: dict[TransferId, Status] = {}
        self._ids, self._peers = itertools.count(1), itertools.count(1)

    def connect(self, address: bytes) -> PeerId:
        return PeerId(next(self._peers))

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer, status = TransferId(next(self._ids)), Status(state=State.DONE)
        if copies.total == WORD_BYTES * len(copies):
            for address in copies.local.tolist():
                ctypes.c_uint64.from_address(address).value = WORD
        else:
            status = self._pages
        self._statuses[transfer] = status
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        return [self._statuses[transfer] for transfer in transfers]

    def forget(self, transfer: TransferId) -> None:
        del self._statuses[transfer]

    def address(self) -> bytes:
        return bytes(600)

    def notifications(self) -> list[Notification]:
        return []

    def register(self, region: Region) -> None:
        """Do nothing, as the methods below."""

    def deregister(self, region: Region) -> None: ...

    def disconnect(self, peer: PeerId) -> None: ...

    def notify(self, peer: PeerId, payload: bytes) -> None: ...

    def close(self) -> None: ...
