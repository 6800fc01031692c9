"""What ``/proc`` says of processes, so that a driver can tell whether a peer's is alive."""

from __future__ import annotations

import functools
from pathlib import Path


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot.

    Returns:
        ``None`` if the process is dead, a zombie, or hidden from this one.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # gone, or hidden from us
        return None
    # The name, in parentheses, may hold anything; fields 3 and on follow the last parenthesis.
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


@functools.cache
def boot_id() -> str:
    """Return the random id that the kernel was given at boot: it differs per host and boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def pid_namespace() -> int:
    """Return the inode of this process's pid namespace; a pid has a meaning only within one."""
    return Path("/proc/self/ns/pid").stat().st_ino
