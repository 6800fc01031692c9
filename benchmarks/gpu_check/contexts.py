"""Which threads of a process chose a device, and what the process holds on each GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .devices import Device

WITHOUT_MEMORY = ("kvferry-handshake", "kvferry-side-channels", "gpu-check-")
"""How the names begin of threads that use neither the transport nor the engine's memory, and of the
check's own."""

LIBRARY = "libcuda.so.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextReport:
    """The state of a process at one moment.

    Attributes:
        entered: thread to the device that the thread has chosen.
        contexts: thread to the CUDA context that it had then; 0 for none.
        not_entered: Python's threads that have chosen none, without those of ``WITHOUT_MEMORY``.
        native_threads: how many threads have each name, those of native libraries included.
        active: the GPUs on which this process has a primary context.
        used_mib: GPU to the MiB that all processes use there; empty without ``nvidia-smi``.
    """

    entered: dict[str, int]
    contexts: dict[str, int]
    not_entered: list[str]
    native_threads: dict[str, int]
    active: list[int]
    used_mib: dict[str, int]

    def problems(self, device: int) -> list[str]:
        """Return what is wrong in a process that should use one GPU only.

        Args:
            device: the index of the GPU.
        """
        found = [f"thread {name} chose no device" for name in self.not_entered]
        found += [
            f"thread {name} is on device {index}, not {device}"
            for name, index in self.entered.items()
            if index != device
        ]
        found += [f"thread {name} has no context" for name, it in self.contexts.items() if not it]
        if len(set(self.contexts.values()) - {0}) > 1:
            found.append(f"threads have different contexts: {self.contexts}")
        return found + [
            f"a stray context on GPU {index}" for index in self.active if index != device
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


@dataclass(slots=True, eq=False)
class EnterLog:
    """An ``EnterThread`` that chooses the device and notes the thread.

    Attributes:
        device: the device.
        entered: thread to the device that torch names afterwards.
        contexts: thread to the handle of its context afterwards.
    """

    device: Device
    entered: dict[str, int] = field(default_factory=dict)
    contexts: dict[str, int] = field(default_factory=dict)

    def __call__(self) -> None:
        """Choose the device for this thread, and note it."""
        self.device.enter()
        name, is_cuda = threading.current_thread().name, self.device.is_cuda
        self.entered[name] = self.device.torch.cuda.current_device() if is_cuda else 0
        if is_cuda:
            self.contexts[name] = _current_context()

    def report(self) -> ContextReport:
        """Return the state of this process now."""
        names = {thread.name for thread in threading.enumerate()}
        ours = {name for name in names if not name.startswith(WITHOUT_MEMORY)}
        return ContextReport(
            entered=dict(self.entered),
            contexts=dict(self.contexts),
            not_entered=sorted(ours - set(self.entered)),
            native_threads=_native_threads(),
            active=active_contexts(),
            used_mib=used_mib() if self.device.is_cuda else {},
        )


def active_contexts() -> list[int]:
    """Return the GPUs on which this process has a primary context, without making one."""
    try:
        cuda = ctypes.CDLL(LIBRARY)
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [index for index in range(count.value) if _is_active(cuda, index)]


def used_mib() -> dict[str, int]:
    """Return GPU to MiB in use, as ``nvidia-smi`` has it; empty if it is not there."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return {}
    query = [smi, "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    pairs = [line.replace(" ", "").split(",") for line in said.splitlines()]
    return {gpu: int(mib) for gpu, mib, *_ in pairs if mib.isdigit()}


def _current_context() -> int:
    """Return the handle of the calling thread's context; 0 if it has none."""
    context = ctypes.c_void_p()
    ctypes.CDLL(LIBRARY).cuCtxGetCurrent(ctypes.byref(context))
    return context.value or 0


def _is_active(cuda: Any, index: int) -> bool:
    flags, active = ctypes.c_uint(), ctypes.c_int()
    cuda.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active))
    return bool(active.value)


def _native_threads() -> dict[str, int]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text(encoding="utf-8").strip())
        except OSError:  # the thread has ended
            continue
    return dict(sorted(Counter(names).items()))
