"""Transfers of GPU memory: wait for the GPU's queues, flush a NIC's writes, and explain errors.

UCX reports the end of its requests. But copies may still wait in a GPU's queues, and the GPU may
not see yet what a NIC has written. CUDA's driver API knows both.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.core.errors import TransportUnsupportedError
from kvferry.core.transport import EnterThread
from kvferry.drivers.cuda import CudaDriver, DeviceWait
from kvferry.drivers.ucx.connection import UcxConnection
from kvferry.drivers.ucx.ucp_structs import Code

# Statuses of a read that no transport of the connection can carry out. If UCX (1.21 and
# 1.22) has no protocol for a read, it reports ``CANCELED`` at once; the connection stays usable.
NO_TRANSPORT = frozenset(
    {Code.CANCELED, Code.UNSUPPORTED, Code.UNREACHABLE, Code.INVALID_ADDR, Code.NO_DEVICE}
)

WITHOUT_NIC = frozenset(
    ("self", "tcp", "sysv", "posix", "cma", "knem", "xpmem", "cuda_copy", "cuda_ipc", "gdr_copy")
)
"""The UCX transports by which no NIC writes into a GPU's memory."""


class LocalDevices:
    """The GPUs whose memory a transfer reads into."""

    def __init__(self, cuda: CudaDriver, devices: Iterable[int], enter: EnterThread) -> None:
        self._cuda = cuda
        self._devices = sorted(set(devices))
        self._enter = enter
        self._wait: DeviceWait | None = None

    def are_quiet(self) -> bool:
        """Return whether all that was enqueued before the first call is done. Never block."""
        if self._wait is None:
            self._wait = DeviceWait(self._cuda, self._devices, self._enter)
        return self._wait.quiet

    def flush(self, transports: frozenset[str]) -> None:
        """Make what ``transports`` (empty: unknown) have moved visible to new work on the GPUs."""
        if transports and transports <= WITHOUT_NIC:
            return
        for device in self._devices:
            self._cuda.flush(device)


def unreachable_memory_error(
    kinds: Iterable[str], connection: UcxConnection, reason: object
) -> TransportUnsupportedError:
    """Return the error for a transfer that UCX cannot carry out; it says what to look at."""
    return TransportUnsupportedError(
        f"UCX cannot move {' and '.join(sorted(kinds))} memory from or to "
        f"{connection.server.name} over {', '.join(sorted(connection.transports))}: {reason}. "
        "Between hosts, this needs RDMA, and nvidia_peermem or dmabuf on both, so that the NIC "
        "reaches the GPU's memory; on one host RDMA or cuda_ipc, for which containers must share "
        "their IPC and PID namespaces. Both sides must allow these transports (driver_options: "
        "transports); UCX_PROTO_INFO=y prints which ones UCX uses"
    )
