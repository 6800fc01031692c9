"""Facts about processes from ``/proc``, by which a driver knows whether a peer's process is alive.

The kernel reuses pids: pid and start time together identify a process within one pid namespace and
one boot of a host.
"""

from __future__ import annotations

import functools
from pathlib import Path


def start_time(pid: int) -> int | None:
    """Return when a process of this pid namespace started, in clock ticks since boot.

    ``None`` if it is dead, a zombie, or hidden from this process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # the process is gone, or hidden from this process
        return None
    # Field 2, the name in parentheses, may contain anything; field 3 follows the last parenthesis.
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


@functools.cache
def boot_id() -> str:
    """Return the random id of this boot: other hosts and other boots have other ids."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def pid_namespace() -> int:
    """Return the inode number of this process's pid namespace, in which its pid is unique."""
    return Path("/proc/self/ns/pid").stat().st_ino
