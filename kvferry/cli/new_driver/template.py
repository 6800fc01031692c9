"""A driver for kvferry: it reads the CPU memory of other processes of this host and user.

It passes the conformance suite. Replace what moves the bytes, and run the suite again.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Hashable, Sequence
from typing import Annotated, ClassVar

import msgspec
import numpy as np

from kvferry.core.errors import ConnectError, PeerLostError, TransportError
from kvferry.core.memory import CPU, Region, U64Array
from kvferry.core.transport import (
    BaseTransport,
    Capabilities,
    Quiescence,
    State,
    Status,
    TransferRequest,
    procfs,
)

_PIECE = np.uint64(1 << 16)
_PIECES_AT_ONCE = 1024  # the system call takes no more

_libc = ctypes.CDLL(None, use_errno=True)
_pointer, _number = ctypes.c_void_p, ctypes.c_ulong
_libc.process_vm_readv.argtypes = [ctypes.c_int, _pointer, _number, _pointer, _number, _number]
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.prctl.argtypes = [ctypes.c_int, *[_number] * 4]
_PR_SET_PTRACER, _ANY_PROCESS = 0x59616D61, 2**64 - 1


class TemplatePeer(msgspec.Struct, tag="kvferry-template-1", eq=False):
    """A peer: its address, which is not trusted, and the connection to it, which is no more here.

    While the peer's transport is open, its secret is in its process's memory, at ``secret_at``.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    host: str
    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    secret: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    secret_at: Annotated[int, msgspec.Meta(gt=0)]
    regions: Annotated[frozenset[Region], msgspec.Meta(max_length=1 << 14)]

    @property
    def identity(self) -> Hashable:
        """All by which the peer is reached."""
        return self.name, self.pid, self.secret, self.secret_at

    def read(self, here: U64Array, there: U64Array) -> None:
        """Copy from the peer's memory; rows of both arrays are an address and a length in bytes."""
        rows = (here.ctypes.data, len(here), there.ctypes.data, len(there))
        moved = _libc.process_vm_readv(self.pid, *rows, 0)
        if moved != here[:, 1].sum():
            why = os.strerror(ctypes.get_errno()) if moved < 0 else "a part of it is not mapped"
            raise PeerLostError(f"cannot read the memory of {self.name}: {why}")

    def check(self) -> None:
        """Raise ``PeerLostError`` if the peer is dead or closed."""
        found = ctypes.create_string_buffer(16)
        here = np.array([[ctypes.addressof(found), 16]], np.uint64)
        self.read(here, np.array([[self.secret_at, 16]], np.uint64))
        if found.raw != self.secret:
            raise PeerLostError(f"{self.name} is closed")


class TemplateTransfer:
    """A read. Bytes move within ``step`` only, so no byte lands after the transfer was stopped."""

    def __init__(self, request: TransferRequest[TemplatePeer]) -> None:
        self.status, self._peer = Status(state=State.PENDING), request.connection
        # The arrays of the request belong to the caller. These are others, with short copies only.
        local, remote, nbytes = request.copies.local, request.copies.remote, request.copies.nbytes
        count = ((nbytes + _PIECE - np.uint64(1)) // _PIECE).astype(np.intp)
        piece = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
        start = piece.astype(np.uint64) * _PIECE
        size = np.minimum(np.repeat(nbytes, count) - start, _PIECE)
        self._here = np.stack([np.repeat(local, count) + start, size], axis=1)
        self._there = np.stack([np.repeat(remote, count) + start, size], axis=1)

    def step(self) -> None:
        """Move the next bytes. DONE only if the peer was there before and after the last."""
        now, later = slice(_PIECES_AT_ONCE), slice(_PIECES_AT_ONCE, None)
        try:
            self._peer.check()
            self._peer.read(self._here[now], self._there[now])
            self._peer.check()
        except TransportError as exc:
            self.status = Status(state=State.FAILED, error=exc)
            return
        self._here, self._there = self._here[later], self._there[later]
        if not len(self._here):
            self.status = Status(state=State.DONE)


class TemplateTransport(BaseTransport[None, TemplatePeer, TemplatePeer, TemplateTransfer]):
    """Read with ``process_vm_readv``, within ``poll``."""

    interface_version: ClassVar[tuple[int, int]] = (2, 0)

    def __init__(self) -> None:
        super().__init__(
            f"template-{os.getpid()}-{secrets.token_hex(8)}",
            Capabilities(
                memory=frozenset({CPU}),
                max_notification=0,
                cancel=True,
                background_progress=False,
                quiescence=Quiescence.ALWAYS,
            ),
        )
        self._host = f"{procfs.boot_id()} {procfs.pid_namespace()}"
        self._secret = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
        # Where Yama guards processes, let others of this user read this one.
        _libc.prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)

    def _register(self, region: Region) -> None:
        """Nothing to do: the system call reads any memory."""

    def _deregister(self, region: Region, registration: None) -> None:
        """Nothing to do."""

    def _address(self) -> bytes:
        secret, at = self._secret.raw, ctypes.addressof(self._secret)
        regions = frozenset(self._registered)
        me = TemplatePeer(self.name, self._host, os.getpid(), secret, at, regions)
        return msgspec.msgpack.encode(me)

    def _decode_address(self, address: bytes) -> TemplatePeer:
        try:
            theirs = msgspec.msgpack.decode(address, type=TemplatePeer)
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            raise ConnectError(f"not an address of the driver template: {exc}") from exc
        if theirs.host != self._host:
            raise ConnectError(f"{theirs.name} is on another host, or in another container")
        return theirs

    def _identity(self, address: TemplatePeer) -> Hashable:
        return address.identity

    def _connect(self, address: TemplatePeer) -> TemplatePeer:
        try:
            address.check()
        except PeerLostError as exc:
            raise ConnectError(str(exc)) from exc
        return address

    def _refresh(self, connection: TemplatePeer, address: TemplatePeer) -> None:
        connection.regions = address.regions

    def _disconnect(self, connection: TemplatePeer, transfers: Sequence[TemplateTransfer]) -> None:
        """Nothing to do: the base class has stopped the transfers."""

    def _start(self, request: TransferRequest[TemplatePeer]) -> TemplateTransfer:
        return TemplateTransfer(request)

    def _progress(self, transfers: Sequence[TemplateTransfer]) -> None:
        for transfer in self._unfinished():  # all of them: nobody else moves their bytes
            transfer.step()

    def _fail(self, transfer: TemplateTransfer, error: TransportError) -> None:
        if not transfer.status.state.final:
            transfer.status = Status(state=State.FAILED, error=error)

    def _close(self, transfers: Sequence[TemplateTransfer]) -> None:
        ctypes.memset(self._secret, 0, 16)
