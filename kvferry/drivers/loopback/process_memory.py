"""Access to another process's memory: the driver's only system calls through ctypes."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
from pathlib import Path

from kvferry.core.errors import DriverError

MAX_IOVECS = 1024
"""UIO_MAXIOV: the most entries of an iovec array that the kernel takes in one call."""

IOVEC = struct.Struct("2Q")
"""A range of memory for the kernel: the address of its first byte, and its length in bytes."""

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_MS_ASYNC = 1
_PAGE = os.sysconf("SC_PAGE_SIZE")


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
    libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
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


def is_mapped(address: int, nbytes: int) -> bool:
    """Return whether every page of a range of memory is mapped in this process."""
    first = address // _PAGE * _PAGE
    # With MS_ASYNC msync writes nothing; it only walks the mappings.
    return bool(_libc().msync(first, address + nbytes - first, _MS_ASYNC) == 0)


def why_forbidden(code: int, pid: int) -> str:
    """Return why the kernel refused a copy with this errno, and a remedy, for an error's text."""
    if code == errno.ENOSYS:
        return (
            "this kernel has no process_vm_readv, or a sandbox filters it: allow it in the "
            "seccomp profile"
        )
    if code != errno.EPERM:
        return f"process_vm_readv on process {pid} failed: {os.strerror(code)}"
    return f"the kernel forbids reading the memory of process {pid}: {_remedy(pid)}"


def _remedy(pid: int) -> str:
    peer = _uid(pid)
    if peer is not None and peer != os.geteuid():
        return (
            f"it runs as uid {peer} and this process as uid {os.geteuid()}; run both as one user, "
            "or give this one CAP_SYS_PTRACE"
        )
    scope = _ptrace_scope()
    if scope >= 2:
        return (
            f"kernel.yama.ptrace_scope is {scope}; set it to 1 or 0 "
            "(sysctl -w kernel.yama.ptrace_scope=1), or give this process CAP_SYS_PTRACE"
        )
    return (
        "it may have been made non-dumpable (by set-user-id or file capabilities) or live in "
        "another container; give this process CAP_SYS_PTRACE (--cap-add=SYS_PTRACE)"
        + (", or set kernel.yama.ptrace_scope to 0" if scope else "")
    )


def _uid(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _ptrace_scope() -> int:
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
