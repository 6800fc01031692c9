"""Identify this process to its peers, and find out whether a peer's process still lives."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from kvferry.drivers.ucx.address import ProcessIdentity


def this_process() -> ProcessIdentity:
    """Return the identity of this process."""
    pid = os.getpid()
    return ProcessIdentity(_boot(), _namespace(), pid, _start_time(pid) or 0)


def has_ended(process: ProcessIdentity) -> bool:
    """Return whether a process has ended; False for another host or another pid namespace."""
    if (process.boot, process.namespace) != (_boot(), _namespace()):
        return False
    return _start_time(process.pid) != process.start_time


def _start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; ``None`` if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name, in parentheses, may hold anything; fields 3 and on follow the last parenthesis.
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


@functools.cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
