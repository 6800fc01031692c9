"""Where a process is, and whether one of this host still lives."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from kvferry.drivers.ucx.address import ProcessIdentity


def here() -> ProcessIdentity:
    """This process."""
    pid = os.getpid()
    return ProcessIdentity(_boot(), _namespace(), pid, _start_time(pid) or 0)


def has_ended(place: ProcessIdentity) -> bool:
    """Whether a process is known to have ended; one of another host never is."""
    if (place.boot, place.namespace) != (_boot(), _namespace()):
        return False
    return _start_time(place.pid) != place.start_time


def _start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; ``None`` if there is none."""
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
