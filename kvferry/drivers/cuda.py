"""Call CUDA's driver API by ctypes: wait for a GPU's queues, and flush what a NIC has written.

After a failed transfer, copies may still wait in the GPU's queues, and only the GPU knows when they
have run. Bytes that a NIC wrote may not be visible yet to work that starts on the GPU. The module
needs no CUDA toolkit, and imports where there is no GPU.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kvferry.core.errors import TransportError

logger = logging.getLogger(__name__)

_LIBRARY = "libcuda.so.1"

_CAPTURE_SECONDS = 0.25
"""The pause after a refused wait; not shorter: each refused call may invalidate the capture."""

# Of cuda.h.
_CAPTURING = 900  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
_RDMA_SUPPORTED = 116  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED
_WRITES_ORDERING = 118  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
_FLUSH_OPTIONS = 117  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
_HOST_PAGE_TABLES = 100  # CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
_ORDERED_FOR_OWNER = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER; below it: not ordered
_EXPORTS_DMABUF = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
_CAN_FLUSH = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
_CURRENT_CONTEXT = 0  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
_TO_OWNER = 100  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER

_ADDRESS_BYTES = 32  # more than any PCI address has

_INT = ctypes.c_int
_POINTER = ctypes.c_void_p
_OUT = ctypes.POINTER(_INT)
_ARGUMENTS: dict[str, list[Any]] = {
    "cuInit": [ctypes.c_uint],
    "cuGetErrorString": [_INT, ctypes.POINTER(ctypes.c_char_p)],
    "cuDeviceGet": [_OUT, _INT],
    "cuDeviceGetCount": [_OUT],
    "cuDeviceGetPCIBusId": [ctypes.c_char_p, _INT, _INT],
    "cuDeviceGetAttribute": [_OUT, _INT, _INT],
    "cuDevicePrimaryCtxGetState": [_INT, ctypes.POINTER(ctypes.c_uint), _OUT],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(_POINTER), _INT],
    "cuDevicePrimaryCtxRelease_v2": [_INT],
    "cuCtxPushCurrent_v2": [_POINTER],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(_POINTER)],
    "cuCtxSynchronize": [],
    "cuFlushGPUDirectRDMAWrites": [_INT, _INT],
}


class StreamCaptureError(TransportError):
    """CUDA refuses a call while a stream of the process is being captured into a CUDA graph."""


class CudaDriver:
    """The driver API of this machine's GPUs, by their index. Any thread may call it.

    Methods raise ``TransportError`` if CUDA refuses.
    """

    def __init__(self, library: Any) -> None:  # noqa: ANN401 - a C library
        self._library = library
        self._needs_flush: dict[int, bool] = {}
        self._call("cuInit", 0)

    def count(self) -> int:
        """Return how many devices this process sees."""
        found = _INT()
        self._call("cuDeviceGetCount", ctypes.byref(found))
        return found.value

    def pci_address(self, device: int) -> str:
        """Return the PCI address of a device, such as ``0000:1b:00.0``."""
        text = ctypes.create_string_buffer(_ADDRESS_BYTES)
        self._call("cuDeviceGetPCIBusId", text, _ADDRESS_BYTES, self._device(device))
        return text.value.decode()

    def exports_dmabuf(self, device: int) -> bool:
        """Return whether a device's memory can be given to a NIC's driver as a dmabuf."""
        return self._attribute(device, _EXPORTS_DMABUF) == 1

    def wait_idle(self, device: int) -> None:
        """Wait until a device has done all that this process has enqueued, the engine's work too.

        Raises ``StreamCaptureError`` while a stream is being captured.
        """
        with self._context(device) as active:
            if active:
                self._call("cuCtxSynchronize")

    def needs_flush(self, device: int) -> bool:
        """Return whether ``flush`` must follow a NIC's writes, for new work to see their bytes."""
        if device not in self._needs_flush:
            reached = self._attribute(device, _RDMA_SUPPORTED) == 1
            ordered = self._attribute(device, _WRITES_ORDERING) >= _ORDERED_FOR_OWNER
            # NVLink-C2C (Grace): a completion comes by another way than the bytes, and may overtake
            # them.
            by_c2c = self._attribute(device, _HOST_PAGE_TABLES) == 1
            self._needs_flush[device] = reached and (not ordered or by_c2c)
        return self._needs_flush[device]

    def can_flush(self, device: int) -> bool:
        """Return whether ``flush`` works on a device."""
        return bool(self._attribute(device, _FLUSH_OPTIONS) & _CAN_FLUSH)

    def flush(self, device: int) -> None:
        """Make what NICs have written into a device's memory visible to new work, if need be."""
        if not self.needs_flush(device):
            return
        if not self.can_flush(device):
            raise TransportError(
                f"GPU {device} neither orders what a NIC writes, nor can be told to flush it: "
                "bytes that have arrived may not be visible to the model. Use a driver or a way "
                "that copies by the GPU (NVLink), or CPU memory"
            )
        with self._context(device):
            self._call("cuFlushGPUDirectRDMAWrites", _CURRENT_CONTEXT, _TO_OWNER)

    @contextmanager
    def _context(self, device: int) -> Iterator[bool]:
        """Give this thread the device's primary context; yield False if it has none (no work)."""
        handle = self._device(device)
        flags, active = ctypes.c_uint(), _INT()
        self._call("cuDevicePrimaryCtxGetState", handle, ctypes.byref(flags), ctypes.byref(active))
        if not active.value:
            yield False
            return
        context = _POINTER()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield True
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(context))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", handle)

    def _device(self, device: int) -> int:
        handle = _INT()
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        return handle.value

    def _attribute(self, device: int, attribute: int) -> int:
        value = _INT()
        code = self._library.cuDeviceGetAttribute(
            ctypes.byref(value), attribute, self._device(device)
        )
        return 0 if code else value.value

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"no such error is known").decode(errors="replace")
            error = StreamCaptureError if code == _CAPTURING else TransportError
            raise error(f"CUDA refuses {name}: {reason} ({code})")


class DeviceWait:
    """A thread that waits until devices have done what was enqueued on them until now."""

    def __init__(self, cuda: CudaDriver, devices: Iterable[int], enter: Callable[[], None]) -> None:
        self._cuda = cuda
        self._devices = sorted(set(devices))
        self._enter = enter
        self.quiet = False  # whether all have done it; stays False if a device reports an error
        # A daemon: a kernel that never ends must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="kvferry-cuda-wait", daemon=True)
        self._thread.start()

    def until(self, deadline: float) -> bool:
        """Wait until a deadline (monotonic) at most; return whether all are ``quiet``."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self.quiet

    def _run(self) -> None:
        left = self._devices.copy()
        try:
            self._enter()
            while left:
                try:
                    self._cuda.wait_idle(left[0])
                    del left[0]
                except StreamCaptureError:
                    time.sleep(_CAPTURE_SECONDS)
        except Exception:
            logger.exception(
                "cannot tell whether GPUs %s have ended the copies of a failed transfer: its pages "
                "stay in use; restart the engine",
                self._devices,
            )
        else:
            self.quiet = True


@functools.cache
def find_cuda() -> CudaDriver | None:
    """Return the driver API of this machine; ``None`` if there is none, or no GPU."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _INT
        return CudaDriver(library)
    except (OSError, AttributeError, TransportError):
        return None
