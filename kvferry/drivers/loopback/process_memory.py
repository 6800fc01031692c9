"""Read the memory of a peer's process, by ``process_vm_readv``; it may be this process."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
from dataclasses import dataclass

import numpy as np

from kvferry.core.errors import ConnectError, DriverError, PeerLostError, TransportError
from kvferry.core.transport.merged_copies import MergedCopies
from kvferry.core.transport.procfs import boot_id, pid_namespace, start_time
from kvferry.drivers.loopback.address import (
    INSTANCE_BYTES,
    ExpectedRows,
    LoopbackAddress,
    expected_rows,
)

IOVEC = struct.Struct("2Q")
"""A range of memory for the kernel: the address of its first byte, and its length in bytes."""

_MAX_IOVECS = 1024
"""UIO_MAXIOV: the most entries of an iovec array that the kernel takes in one call."""

MAX_RUNS = _MAX_IOVECS - 2
"""The most runs of a chunk: the same call reads the peer's registry, in two ranges."""

# A chunk within these limits takes microseconds, so it keeps the interpreter's lock; see vm_read.
_BRIEF_BYTES = 32 << 10
_BRIEF_RUNS = 16

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


@functools.cache
def _libc(*, holding_lock: bool = False) -> ctypes.CDLL:
    library = ctypes.PyDLL if holding_lock else ctypes.CDLL
    libc = library(None, use_errno=True)
    array, count = ctypes.c_void_p, ctypes.c_ulong
    try:
        read = libc.process_vm_readv
    except AttributeError as exc:
        raise DriverError(
            "the loopback driver needs Linux: this C library has no process_vm_readv"
        ) from exc
    read.argtypes = [ctypes.c_int, array, count, array, count, ctypes.c_ulong]
    read.restype = ctypes.c_ssize_t
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    return libc


def vm_read(pid: int, local: bytes, remote: bytes, *, brief: bool = False) -> int:
    """Read from another process, by one system call; return how many bytes.

    They are fewer than requested if a page of one side is not mapped; an ``OSError`` (``ESRCH``,
    ``EPERM``, ``EFAULT``, ``ENOSYS``, ...) means none. Either side is at most 1024 packed
    ``IOVEC``. ``brief`` keeps the interpreter's lock: to get it back may take 5 ms.
    """
    read = _libc(holding_lock=brief).process_vm_readv
    moved = read(pid, local, len(local) // IOVEC.size, remote, len(remote) // IOVEC.size, 0)
    if moved < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(moved)


def allow_readers() -> None:
    """Allow every process of the same user to read this process's memory.

    Yama otherwise allows only ancestors; a kernel without Yama refuses the call, and needs none.
    """
    _libc().prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def why_forbidden(code: int, pid: int) -> str:
    """Return why the kernel refused a copy with this errno, and a remedy, for an error's text."""
    if code == errno.ENOSYS:
        return (
            "this kernel has no process_vm_readv, or a sandbox filters it: allow it in the "
            "seccomp profile"
        )
    if code != errno.EPERM:
        return f"process_vm_readv on process {pid} failed: {os.strerror(code)}"
    return (
        f"the kernel forbids reading the memory of process {pid}: run both as one user; if they "
        "are, give this process CAP_SYS_PTRACE (--cap-add=SYS_PTRACE), which containers and "
        "kernel.yama.ptrace_scope of 2 or more require"
    )


# Not frozen: to make a frozen dataclass takes a microsecond.
@dataclass(slots=True, eq=False)
class Chunk:
    """The part of a transfer that one system call moves."""

    local: bytes  # packed ``IOVEC``, where to
    remote: bytes  # packed ``IOVEC`` of the peer, with the same lengths
    nbytes: int

    @property
    def runs(self) -> int:
        """The number of ranges of either side."""
        return len(self.local) // IOVEC.size


_NOTHING = Chunk(b"", b"", 0)


def chunk_of_one(local: int, remote: int, nbytes: int) -> Chunk:
    """Return a chunk that copies one contiguous range, which may have 0 bytes."""
    return Chunk(IOVEC.pack(local, nbytes), IOVEC.pack(remote, nbytes), nbytes)


def chunk_of_runs(runs: MergedCopies, part: slice) -> Chunk:
    """Return a chunk that copies successive runs of a transfer, at most ``MAX_RUNS``."""
    nbytes = runs.nbytes[part]
    ranges = np.empty((2, len(nbytes), 2), np.uint64)
    ranges[0, :, 0], ranges[1, :, 0], ranges[:, :, 1] = runs.local[part], runs.remote[part], nbytes
    return Chunk(ranges[0].tobytes(), ranges[1].tobytes(), int(nbytes.sum()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeerMemory:
    """Access to the memory of one peer. Several threads may use one object at once."""

    owner: str
    pid: int
    registry: int  # the address of the peer's registry, in its process

    def move(self, chunk: Chunk, expected: ExpectedRows) -> None:
        """Read the bytes of a chunk, if the peer lives and has the regions registered.

        Raises ``PeerLostError`` if it has died, restarted or closed, else ``TransportError``. Bytes
        may have moved then.
        """
        if chunk.nbytes and self.pid == os.getpid():
            self.check(expected)  # so that no byte moves: without it, only the result would fail
        # One call reads the bytes, and then the registry. If the instance is there, the pid was the
        # peer's throughout: no other process ever has these bytes at this address.
        found = ctypes.create_string_buffer(INSTANCE_BYTES + expected.nbytes)
        local = chunk.local + IOVEC.pack(ctypes.addressof(found), len(found))
        remote = chunk.remote + IOVEC.pack(self.registry, INSTANCE_BYTES)
        remote += IOVEC.pack(self.registry + expected.start, expected.nbytes)
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
            expected.check(found.raw, self.owner)
            return
        if not chunk.nbytes:
            raise self._lost()
        self.check(expected)
        raise TransportError(
            f"the kernel copied {moved} of {chunk.nbytes} bytes and stopped: memory of this side "
            f"or of {self.owner} is registered but not mapped any more, or read-only; keep memory "
            "mapped until it is deregistered"
        )

    def check(self, expected: ExpectedRows) -> None:
        """Raise what ``move`` raises, and read no bytes."""
        self.move(_NOTHING, expected)

    def _lost(self) -> PeerLostError:
        return PeerLostError(f"{self.owner} is gone: process {self.pid} has ended or restarted")


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
    if start_time(address.pid) != address.start_time:
        raise ConnectError(f"{address.name} is gone: process {address.pid} has ended or restarted")
    memory = PeerMemory(owner=address.name, pid=address.pid, registry=address.board)
    try:
        memory.check(expected_rows(address.instance, ()))
    except TransportError as exc:
        raise ConnectError(f"cannot connect to {address.name}: {exc}") from exc
    return memory
