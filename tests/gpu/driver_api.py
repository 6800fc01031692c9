"""A stand-in for libcuda: devices with a queue of work, and a record of every call."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

SUCCESS = 0
INVALID_CONTEXT = 201
LAUNCH_FAILED = 719
STREAM_CAPTURE_UNSUPPORTED = 900

HOST_PAGE_TABLES, RDMA_SUPPORTED, FLUSH_OPTIONS, WRITES_ORDERING = 100, 116, 117, 118
"""Attributes of a device."""

NEVER = 1e9  # a time that no test reaches, for a queue that does not drain


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaCall:
    """A call of the driver API, with the device of the thread's context, if it had one."""

    thread: int
    name: str
    device: int | None


@dataclass(slots=True, eq=False)
class StandInCuda:
    """Stands in for the loaded libcuda, with functions of the same names.

    A context's handle is the device's index plus 1, and a device's handle its index. ``active``
    devices have a primary context. Attributes are 0, but 116 (NICs reach the memory) is 1.
    ``cuCtxSynchronize`` reports an error on ``broken`` devices, and is refused ``capturing`` times.
    ``idle_at`` is when a device has done what is enqueued on it, by ``time.monotonic``.
    """

    devices: int = 2
    active: set[int] = field(default_factory=lambda: {0, 1})
    attributes: dict[tuple[int, int], int] = field(default_factory=dict)
    idle_at: dict[int, float] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)
    capturing: int = 0
    calls: list[CudaCall] = field(default_factory=list)
    retained: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _local: threading.local = field(default_factory=threading.local)

    @property
    def contexts(self) -> list[int]:
        """The calling thread's stack of contexts, as devices."""
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[int] = self._local.stack
        return stack

    def called(self, name: str) -> list[int | None]:
        """On which devices a function was called, in order."""
        return [call.device for call in self.calls if call.name == name]

    def _record(self, name: str) -> None:
        device = self.contexts[-1] if self.contexts else None
        self.calls.append(CudaCall(thread=threading.get_ident(), name=name, device=device))

    def cuInit(self, flags: int) -> int:
        return SUCCESS

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = f"stand-in's error {code}".encode()
        return SUCCESS

    def cuDeviceGet(self, handle: Any, index: int) -> int:
        if index >= self.devices:
            return 101
        handle._obj.value = index
        return SUCCESS

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.devices
        return SUCCESS

    def cuDeviceGetPCIBusId(self, text: Any, length: int, device: int) -> int:
        text.value = f"0000:{0x1B + device:02X}:00.0".encode()
        return SUCCESS

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        value._obj.value = self.attributes.get((device, attribute), int(attribute == 116))
        return SUCCESS

    def cuDevicePrimaryCtxGetState(self, device: int, flags: Any, active: Any) -> int:
        active._obj.value = int(device in self.active)
        return SUCCESS

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        self.retained[device] += 1
        self.active.add(device)
        context._obj.value = device + 1
        return SUCCESS

    def cuDevicePrimaryCtxRelease_v2(self, device: int) -> int:
        self.retained[device] -= 1
        return SUCCESS

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:
        self.contexts.append((context.value or 0) - 1)
        return SUCCESS

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.contexts.pop()
        return SUCCESS

    def cuCtxSynchronize(self) -> int:
        self._record("cuCtxSynchronize")
        if not self.contexts:
            return INVALID_CONTEXT
        device = self.contexts[-1]
        if device in self.broken:
            return LAUNCH_FAILED
        if self.capturing:
            self.capturing -= 1
            return STREAM_CAPTURE_UNSUPPORTED
        while (left := self.idle_at.get(device, 0.0) - time.monotonic()) > 0:
            time.sleep(min(left, 0.01))
        return SUCCESS

    def cuFlushGPUDirectRDMAWrites(self, target: int, scope: int) -> int:
        self._record("cuFlushGPUDirectRDMAWrites")
        return SUCCESS if self.contexts else INVALID_CONTEXT
