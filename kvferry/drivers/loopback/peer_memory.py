"""How a transport gets at a peer's memory: inside this process, or across processes."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvferry.core.errors import ConnectError, PeerLostError, TransportError
from kvferry.drivers.loopback import registry as board
from kvferry.drivers.loopback.address import LoopbackAddress
from kvferry.drivers.loopback.chunked_copy import Chunk, copy_in_process
from kvferry.drivers.loopback.procfs import (
    boot_id,
    pid_namespace,
    start_time,
    vm_copy,
    vm_peek,
    why_forbidden,
)
from kvferry.drivers.loopback.registry import Claims, RegionRegistry

# A copy within these takes microseconds, and keeps the interpreter's lock; see vm_copy.
_BRIEF_BYTES = 32 << 10
_BRIEF_RUNS = 16


class PeerMemory(ABC):
    """Access to one peer's memory. Safe to use from several threads."""

    path: ClassVar[str]
    """What it is, for people."""

    @abstractmethod
    def check(self, claims: Claims) -> None:
        """See whether the peer lives and has registered what is claimed.

        Raises:
            PeerLostError: it has died, restarted or closed.
            TransportError: it has deregistered a region, or the kernel refuses.
        """

    @abstractmethod
    def move(self, chunk: Chunk, claims: Claims, *, write: bool) -> None:
        """Check, then move a chunk.

        Raises:
            PeerLostError, TransportError: as ``check``; or memory of either side is not there.
        """


def reach(address: LoopbackAddress) -> PeerMemory:
    """Find the process that an address names, and prove that its memory can be read.

    Raises:
        ConnectError: it is elsewhere, gone, another one, or may not be read; says what to change.
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
        return _reach_here(address)
    if start_time(address.pid) != address.start_time:
        raise ConnectError(f"{address.name} is gone: process {address.pid} has ended or restarted")
    return _reach_there(address)


def _reach_here(address: LoopbackAddress) -> PeerMemory:
    found = board.board_in_this_process(address.instance)
    if found is None or start_time(address.pid) != address.start_time:
        raise ConnectError(f"{address.name} is gone: this process has closed it")
    return SameProcess(owner=address.name, target=found)


def _reach_there(address: LoopbackAddress) -> PeerMemory:
    there = OtherProcess(
        owner=address.name,
        pid=address.pid,
        board=address.board,
        instance=address.instance,
    )
    try:
        there.check(board.claims_of(()))
    except TransportError as exc:
        raise ConnectError(f"cannot connect to {address.name}: {exc}") from exc
    return there


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SameProcess(PeerMemory):
    """A transport of this process, this side's own among them."""

    path: ClassVar[str] = "memcpy"

    owner: str
    target: RegionRegistry

    def check(self, claims: Claims) -> None:
        board.check(self.target.words, self.target.instance, claims, self.owner)

    def move(self, chunk: Chunk, claims: Claims, *, write: bool) -> None:
        with self.target.gate:
            self.check(claims)
            copy_in_process(chunk, write=write)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OtherProcess(PeerMemory):
    """A transport of another process of this host.

    Attributes:
        owner: its name.
        pid: its process.
        board: address of its board, there.
        instance: what its board starts with.
    """

    path: ClassVar[str] = "process_vm"

    owner: str
    pid: int
    board: int
    instance: bytes

    def check(self, claims: Claims) -> None:
        # Seeing the instance after a copy proves that the pid was still the peer's during it:
        # only that one process has ever had these bytes at this place.
        words = np.empty(claims.words, np.uint64)
        try:
            vm_peek(self.pid, self.board, words)
        except OSError as exc:
            raise self._lost_or_forbidden(exc) from exc
        board.check(words, self.instance, claims, self.owner)

    def move(self, chunk: Chunk, claims: Claims, *, write: bool) -> None:
        self.check(claims)
        brief = chunk.nbytes <= _BRIEF_BYTES and len(chunk.local) <= _BRIEF_RUNS
        try:
            moved = vm_copy(self.pid, chunk.local, chunk.remote, write=write, brief=brief)
        except OSError as exc:
            if exc.errno != errno.EFAULT:
                raise self._lost_or_forbidden(exc) from exc
            moved = 0
        if moved != chunk.nbytes:
            self.check(claims)
            raise self._faulted(chunk, moved)

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
