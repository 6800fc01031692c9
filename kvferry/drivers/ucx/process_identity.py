"""Identify this process to its peers, and find out whether a peer's process still lives."""

from __future__ import annotations

import os

from kvferry.core.transport.procfs import boot_id, pid_namespace, start_time
from kvferry.drivers.ucx.address import ProcessIdentity


def this_process() -> ProcessIdentity:
    """Return the identity of this process."""
    pid = os.getpid()
    return ProcessIdentity(boot_id(), pid_namespace(), pid, start_time(pid) or 0)


def has_ended(process: ProcessIdentity) -> bool:
    """Return whether a process has ended; False for another host or another pid namespace."""
    if (process.boot, process.namespace) != (boot_id(), pid_namespace()):
        return False
    return start_time(process.pid) != process.start_time
