"""Check what the kernel allows: reading another process, pinning memory, sharing memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from kvferry.cli.doctor.finding import Check, Finding
from kvferry.cli.formatting import size

SHARED_ENOUGH = 1 << 30
"""Free bytes of /dev/shm that suffice for engines and UCX."""


def reading(problem: str | None) -> Finding:
    """Return the finding about reading another process's memory, as the driver ``loopback`` does.

    ``problem`` is what ``Probed.reading`` says.
    """
    check = Check("reading processes")
    if problem is None:
        return check.warn("not known: the process that should read did not answer", "try again")
    if not problem:
        return check.ok("process_vm_readv: a process read this one, which is not its child")
    found, _, remedy = problem.rpartition(": ")
    return check.bad(found, remedy)


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
