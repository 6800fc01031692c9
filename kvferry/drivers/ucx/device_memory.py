"""Transfers of GPU memory: wait for the GPU's queues, flush a NIC's writes, and explain errors.

UCX reports the end of its requests. But copies may still wait in the queues of a GPU, and the GPU
may not see yet what a NIC has written into its memory. CUDA's driver API knows both.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.core.errors import TransportUnsupportedError
from kvferry.core.transport import EnterThread
from kvferry.drivers.cuda import CudaDriver, DeviceWait
from kvferry.drivers.ucx.ucp_structs import Code

NO_TRANSPORT = frozenset(
    {Code.CANCELED, Code.UNSUPPORTED, Code.UNREACHABLE, Code.INVALID_ADDR, Code.NO_DEVICE}
)
"""UCX's statuses of a read or write that no transport of the connection can carry out. If UCX (1.21
and 1.22) has no protocol for a read, it reports ``CANCELED`` at once; the connection stays usable.
"""

WITHOUT_NIC = frozenset(
    {
        "self",
        "tcp",
        "sysv",
        "posix",
        "cma",
        "knem",
        "xpmem",
        "cuda_copy",
        "cuda_ipc",
        "gdr_copy",
    }
)
"""The UCX transports by which no NIC writes into a GPU's memory."""


class LocalDevices:
    """The GPUs whose memory a transfer reads into, or writes from.

    Args:
        cuda: CUDA's driver API.
        devices: the indices of the GPUs, as in ``Region.device``.
        enter: called first in the thread that waits for the GPUs.
    """

    def __init__(self, cuda: CudaDriver, devices: Iterable[int], enter: EnterThread) -> None:
        self._cuda = cuda
        self._devices = sorted(set(devices))
        self._enter = enter
        self._wait: DeviceWait | None = None

    def are_quiet(self) -> bool:
        """Return whether the GPUs have done everything that was enqueued before the first call.

        The first call starts a thread that waits for the GPUs. No call blocks.
        """
        if self._wait is None:
            self._wait = DeviceWait(self._cuda, self._devices, self._enter)
        return self._wait.quiet

    def flush(self, transports: frozenset[str]) -> None:
        """Make bytes that have arrived visible to work that starts on the GPUs from now on.

        Does nothing if no NIC has written the bytes, or if the GPUs order what NICs write.

        Args:
            transports: UCX's names of the transports that may have moved the bytes; empty if they
                are not known.

        Raises:
            TransportError: a GPU cannot do this.
        """
        if transports and transports <= WITHOUT_NIC:
            return
        for device in self._devices:
            if self._cuda.needs_flush(device):
                self._cuda.flush(device)


def unreachable_memory_error(
    kinds: Iterable[str], transports: Iterable[str], peer: str, reason: object
) -> TransportUnsupportedError:
    """Return the error for a transfer that UCX cannot carry out; it says what to look at.

    Args:
        kinds: the memory kinds of the regions on both sides.
        transports: UCX's names of the connection's transports.
        peer: the name of the peer.
        reason: what UCX says.
    """
    return TransportUnsupportedError(
        f"UCX cannot move {' and '.join(sorted(kinds))} memory from or to {peer} over "
        f"{', '.join(sorted(transports))}: {reason}. Between hosts, this needs RDMA, and "
        "nvidia_peermem or dmabuf on both, so that the NIC reaches the GPU's memory; on one host "
        "RDMA or cuda_ipc, for which containers must share their IPC and PID namespaces. Both "
        "sides must allow these transports (driver_options: transports); UCX_PROTO_INFO=y prints "
        "which ones UCX uses"
    )
