"""Access to another process's memory: the driver's only system calls through ctypes."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct

from kvferry.core.errors import DriverError

MAX_IOVECS = 1024
"""UIO_MAXIOV: the most entries of an iovec array that the kernel takes in one call."""

IOVEC = struct.Struct("2Q")
"""A range of memory for the kernel: the address of its first byte, and its length in bytes."""

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
    ``EPERM``, ``EFAULT``, ``ENOSYS``, ...) means none. Either side is at most ``MAX_IOVECS`` packed
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
