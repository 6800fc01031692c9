"""A loopback address of this process alone, for ports that are used again after they were closed.

The kernel gives ports of 127.0.0.1 to connections and listeners of all processes at any time.
"""

from __future__ import annotations

import os

_PID = os.getpid()
OWN_HOST = f"127.{64 + (_PID >> 16)}.{_PID >> 8 & 255}.{_PID & 255}"
"""A process id has at most 22 bits."""
