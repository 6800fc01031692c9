"""Access to a peer's memory, where the peer may be in this process or in another."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvferry.core.errors import ConnectError, PeerLostError, TransportError
from kvferry.core.memory import Region
from kvferry.core.transport.procfs import boot_id, pid_namespace, start_time
from kvferry.drivers.loopback.address import LoopbackAddress
from kvferry.drivers.loopback.chunked_copy import Chunk, OneCopy, read_in_process
from kvferry.drivers.loopback.process_memory import (
    vm_peek,
    vm_read,
    vm_read_then_peek,
    why_forbidden,
)
from kvferry.drivers.loopback.registry import (
    Claims,
    Entry,
    RegionRegistry,
    check_claims,
    claims_of,
    registry_in_this_process,
    row_of,
    row_offset,
)

# A copy within these limits takes microseconds, so it keeps the interpreter's lock; see vm_read.
_BRIEF_BYTES = 32 << 10
_BRIEF_RUNS = 16


class PeerMemory(ABC):
    """Access to the memory of one peer. Several threads may use one object at once.

    A transfer's *claims* are the peer's regions that it uses, with the rows that the peer's
    registry (see ``registry``) must have for them.
    """

    path: ClassVar[str]
    """What ``Transport.path`` returns for a peer that is reached this way."""

    @abstractmethod
    def check(self, claims: Claims) -> None:
        """Check that the peer lives and still has the regions of the claims registered.

        Raises:
            PeerLostError: the peer has died, restarted or closed.
            TransportError: a region was deregistered, or the kernel refuses to read the memory.
        """

    @abstractmethod
    def move(self, chunk: Chunk, claims: Claims) -> None:
        """Check the peer's registry as ``check`` does, then read the bytes of a chunk.

        Raises:
            PeerLostError: the peer has died, restarted or closed.
            TransportError: as ``check``; or memory of either side is not mapped.
        """

    def move_one(self, copy: OneCopy, region: Region, entry: Entry) -> None:
        """Make one copy in one region, with the checks of ``move`` before it and after it."""
        claims = claims_of([(region, entry)])
        self.move(copy.chunk(), claims)
        self.check(claims)


def open_memory(address: LoopbackAddress) -> PeerMemory:
    """Return access to the memory of the process that an address names, after checking it.

    Raises:
        ConnectError: the process is on another host or in another pid namespace, has ended or
            closed its transport, or may not be read. The message says what to change.
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
    if address.pid == os.getpid():
        return _same_process(address)
    if start_time(address.pid) != address.start_time:
        raise ConnectError(f"{address.name} is gone: process {address.pid} has ended or restarted")
    return _other_process(address)


def _same_process(address: LoopbackAddress) -> PeerMemory:
    found = registry_in_this_process(address.instance)
    if found is None or start_time(address.pid) != address.start_time:
        raise ConnectError(f"{address.name} is gone: this process has closed it")
    return SameProcess(owner=address.name, target=found)


def _other_process(address: LoopbackAddress) -> PeerMemory:
    there = OtherProcess(
        owner=address.name,
        pid=address.pid,
        registry=address.board,
        instance=address.instance,
    )
    try:
        there.check(claims_of(()))
    except TransportError as exc:
        raise ConnectError(f"cannot connect to {address.name}: {exc}") from exc
    return there


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SameProcess(PeerMemory):
    """The memory of a peer that is in this process; the peer may be the transport itself."""

    path: ClassVar[str] = "memcpy"

    owner: str
    target: RegionRegistry

    def check(self, claims: Claims) -> None:
        """As ``PeerMemory.check``."""
        check_claims(self.target.words, self.target.instance, claims, self.owner)

    def move(self, chunk: Chunk, claims: Claims) -> None:
        """As ``PeerMemory.move``."""
        with self.target.lock:
            self.check(claims)
            read_in_process(chunk)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OtherProcess(PeerMemory):
    """The memory of a peer in another process of this host; ``registry`` is an address there."""

    path: ClassVar[str] = "process_vm"

    owner: str
    pid: int
    registry: int
    instance: bytes

    def check(self, claims: Claims) -> None:
        """As ``PeerMemory.check``."""
        # If the instance is still there after a copy, the pid was the peer's throughout the copy:
        # no other process ever has these bytes at this address.
        words = np.empty(claims.words, np.uint64)
        try:
            vm_peek(self.pid, self.registry, words)
        except OSError as exc:
            raise self._lost_or_forbidden(exc) from exc
        check_claims(words, self.instance, claims, self.owner)

    def move(self, chunk: Chunk, claims: Claims) -> None:
        """As ``PeerMemory.move``."""
        self.check(claims)
        brief = chunk.nbytes <= _BRIEF_BYTES and len(chunk.local) <= _BRIEF_RUNS
        try:
            moved = vm_read(self.pid, chunk.local, chunk.remote, brief=brief)
        except OSError as exc:
            if exc.errno != errno.EFAULT:
                raise self._lost_or_forbidden(exc) from exc
            moved = 0
        if moved != chunk.nbytes:
            self.check(claims)
            raise self._faulted(chunk, moved)

    def move_one(self, copy: OneCopy, region: Region, entry: Entry) -> None:
        """As ``PeerMemory.move_one``, but only with the check after it, in the same call."""
        if not self._read_one(copy, region, entry):
            # Whatever has failed in ``_read_one`` fails here again, with the reason.
            PeerMemory.move_one(self, copy, region, entry)

    def _read_one(self, copy: OneCopy, region: Region, entry: Entry) -> bool:
        row = row_of(region, entry)
        seen = vm_read_then_peek(
            self.pid,
            copy.local,
            (copy.remote, copy.nbytes),
            (
                (self.registry, len(self.instance)),
                (self.registry + row_offset(entry), len(row)),
            ),
            brief=copy.nbytes <= _BRIEF_BYTES,
        )
        return seen == self.instance + row

    def _lost_or_forbidden(self, exc: OSError) -> TransportError:
        if exc.errno in (errno.ESRCH, errno.EFAULT):
            return PeerLostError(f"{self.owner} is gone: process {self.pid} has ended or restarted")
        return TransportError(why_forbidden(exc.errno or 0, self.pid))

    def _faulted(self, chunk: Chunk, moved: int) -> TransportError:
        ends = chunk.local[:, 1].cumsum()
        run = int(ends.searchsorted(np.uint64(moved), side="right"))
        into = moved - int(ends[run] - chunk.local[run, 1])
        local, remote = int(chunk.local[run, 0]) + into, int(chunk.remote[run, 0]) + into
        return TransportError(
            f"the kernel copied {moved} of {chunk.nbytes} bytes and stopped in the page of "
            f"{local:#x} here or {remote:#x} of {self.owner}: one of them is registered but not "
            "mapped any more, or read-only; keep memory mapped until it is deregistered"
        )
