"""Access to a peer's memory, where the peer may be in this process or in another."""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from typing import ClassVar

from kvferry.core.errors import ConnectError, PeerLostError, TransportError
from kvferry.core.transport.procfs import boot_id, pid_namespace, start_time
from kvferry.drivers.loopback.address import LoopbackAddress
from kvferry.drivers.loopback.chunked_copy import NOTHING, Chunk, read_in_process
from kvferry.drivers.loopback.process_memory import IOVEC, vm_read, why_forbidden
from kvferry.drivers.loopback.registry import (
    INSTANCE_BYTES,
    Claims,
    RegionRegistry,
    claims_of,
    registry_in_this_process,
)

# A copy within these limits takes microseconds, so it keeps the interpreter's lock; see vm_read.
_BRIEF_BYTES = 32 << 10
_BRIEF_RUNS = 16


def open_memory(address: LoopbackAddress) -> PeerMemory:
    """Return access to the memory of the process that an address names, after checking it.

    Raises ``ConnectError``, which says what to change, if it cannot be read from here.
    """
    if address.boot != boot_id():
        raise ConnectError(
            f"{address.name} lives on another host; loopback reaches processes of one host: "
            "choose a driver that crosses hosts"
        )
    if address.pid_namespace != pid_namespace():
        raise ConnectError(
            f"{address.name} lives in another pid namespace (a container of its own): let both "
            "share one (docker run --pid=..., shareProcessNamespace in a pod)"
        )
    alive = start_time(address.pid) == address.start_time
    if address.pid == os.getpid():
        found = registry_in_this_process(address.instance)
        if found is None or not alive:
            raise ConnectError(f"{address.name} is gone: this process has closed it")
        return SameProcess(owner=address.name, target=found)
    if not alive:
        raise ConnectError(f"{address.name} is gone: process {address.pid} has ended or restarted")
    there = OtherProcess(owner=address.name, pid=address.pid, registry=address.board)
    try:
        there.check(claims_of(address.instance, ()))
    except TransportError as exc:
        raise ConnectError(f"cannot connect to {address.name}: {exc}") from exc
    return there


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SameProcess:
    """The memory of a peer that is in this process; the peer may be the transport itself."""

    path: ClassVar[str] = "memcpy"

    owner: str
    target: RegionRegistry

    def move(self, chunk: Chunk, claims: Claims) -> None:
        """As ``OtherProcess.move``. No byte moves if the peer lacks a region."""
        with self.target.lock:
            claims.check(self.target.read(claims), self.owner)
            read_in_process(chunk)

    def check(self, claims: Claims) -> None:
        """Raise what ``move`` raises, and read no bytes."""
        self.move(NOTHING, claims)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OtherProcess:
    """The memory of a peer in another process of this host; ``registry`` is an address there."""

    path: ClassVar[str] = "process_vm"

    owner: str
    pid: int
    registry: int

    def move(self, chunk: Chunk, claims: Claims) -> None:
        """Read the bytes of a chunk, if the peer lives and has the regions registered.

        Raises ``PeerLostError`` if it has died, restarted or closed, else ``TransportError``. Bytes
        may have moved then.
        """
        # One call reads the bytes, and then the registry. If the instance is there, the pid was the
        # peer's throughout: no other process ever has these bytes at this address.
        found = ctypes.create_string_buffer(INSTANCE_BYTES + claims.nbytes)
        local = chunk.local + IOVEC.pack(ctypes.addressof(found), len(found))
        remote = chunk.remote + IOVEC.pack(self.registry, INSTANCE_BYTES)
        remote += IOVEC.pack(self.registry + claims.start, claims.nbytes)
        brief = chunk.nbytes <= _BRIEF_BYTES and chunk.runs <= _BRIEF_RUNS
        try:
            moved = vm_read(self.pid, local, remote, brief=brief)
        except OSError as exc:
            if exc.errno == errno.ESRCH:
                raise self._lost() from exc
            if exc.errno != errno.EFAULT:
                raise TransportError(why_forbidden(exc.errno or 0, self.pid)) from exc
            moved = 0
        if moved == chunk.nbytes + len(found):
            claims.check(found.raw, self.owner)
            return
        if not chunk.nbytes:
            raise self._lost()
        self.check(claims)
        raise TransportError(
            f"the kernel copied {moved} of {chunk.nbytes} bytes and stopped: memory of this side "
            f"or of {self.owner} is registered but not mapped any more, or read-only; keep memory "
            "mapped until it is deregistered"
        )

    def check(self, claims: Claims) -> None:
        """Raise what ``move`` raises, and read no bytes."""
        self.move(NOTHING, claims)

    def _lost(self) -> PeerLostError:
        return PeerLostError(f"{self.owner} is gone: process {self.pid} has ended or restarted")


PeerMemory = SameProcess | OtherProcess
"""Access to the memory of one peer. Several threads may use one object at once."""
