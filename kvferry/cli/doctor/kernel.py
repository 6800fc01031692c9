"""Check what the kernel allows: reading another process, pinning memory, sharing memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvferry.cli.doctor.finding import Check, Finding
from kvferry.cli.formatting import size
from kvferry.core.errors import DriverError
from kvferry.drivers.loopback.process_memory import IOVEC, allow_readers, vm_read, why_forbidden

READING = Check("reading processes")
SECONDS = 30.0
SHARED_ENOUGH = 1 << 30
"""Free bytes of /dev/shm that suffice for engines and UCX."""


def reading() -> Finding:
    """Return the finding about reading another process's memory, as the driver ``loopback`` does.

    The check starts a child process that reads this process's memory. Where the kernel's Yama
    module restricts such reads, a child cannot read its parent unless the parent allows readers. So
    this process allows readers first, as engines do.
    """
    word = np.random.default_rng().integers(1, 1 << 62, 1, np.uint64)
    try:
        allow_readers()
    except DriverError as exc:
        return READING.bad(str(exc), "use another driver than loopback")
    command = [sys.executable, "-m", __name__, str(os.getpid()), str(word.ctypes.data)]
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return READING.warn(f"not known: a process did not answer in {SECONDS:.0f} s", "try again")
    said = run.stdout.strip()
    if said == str(word[0]):
        return READING.ok("process_vm_readv: a process read this one, which is not its child")
    problem, _, remedy = said.rpartition(": ")
    return READING.bad(
        problem or said or f"the process that should read ended with status {run.returncode}",
        remedy or "loopback between processes needs process_vm_readv: use another driver",
    )


def _read(pid: int, address: int) -> str:
    """Read a word of another process; return the word as text, or why it cannot be read."""
    word = np.zeros(1, np.uint64)
    try:
        vm_read(pid, IOVEC.pack(word.ctypes.data, word.nbytes), IOVEC.pack(address, word.nbytes))
    except OSError as exc:
        return why_forbidden(exc.errno or 0, pid)
    return str(word[0])


def ptrace_scope(proc: Path = Path("/proc")) -> Finding:
    """Return the finding about Yama's ``ptrace_scope``, which restricts reading other processes."""
    check = Check("ptrace scope")
    try:
        scope = int((proc / "sys/kernel/yama/ptrace_scope").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return check.ok("this kernel has no Yama, or hides it")
    if scope < 2:
        return check.ok(f"kernel.yama.ptrace_scope is {scope}")
    return check.warn(
        f"kernel.yama.ptrace_scope is {scope}: only processes with CAP_SYS_PTRACE read others",
        "sysctl -w kernel.yama.ptrace_scope=1, or run engines with CAP_SYS_PTRACE; UCX's cma needs "
        "it, too",
    )


def locked_memory(*, rdma: bool, limit: int | None = None) -> Finding:
    """Return the finding about how much memory a process may pin for a NIC."""
    check = Check("locked memory")
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if soft == resource.RLIM_INFINITY:
        return check.ok("unlimited")
    if not rdma:
        return check.ok(f"{size(soft)} (matters only with RDMA)")
    return check.warn(
        f"{size(soft)}: registering a KV cache with a NIC will fail",
        "ulimit -l unlimited before the engine starts (LimitMEMLOCK=infinity in systemd, "
        "--ulimit memlock=-1 for a container)",
    )


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Return the finding about how much shared memory is free."""
    check = Check("shared memory")
    try:
        found = os.statvfs(folder)
    except OSError as exc:
        return check.warn(f"{folder}: {exc.strerror}", f"mount a tmpfs at {folder}")
    total, free = (blocks * found.f_frsize for blocks in (found.f_blocks, found.f_bavail))
    said = f"{folder}: {size(free)} of {size(total)} free"
    if free >= SHARED_ENOUGH:
        return check.ok(said)
    return check.warn(
        said,
        f"enlarge or empty {folder} (--shm-size or --ipc=host for a container): vLLM's workers "
        "and UCX's shared-memory transports keep their buffers there",
    )


if __name__ == "__main__":
    sys.stdout.write(_read(*map(int, sys.argv[1:3])))
