"""The memory, streams and events of a GPU by torch, and their counterparts on a CPU."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvferry.core.memory import CUDA

CHUNK_WORDS = 1 << 24
"""How many words of a tensor are computed at once, which bounds the memory of the computation."""


def load_torch() -> Any:
    """Import torch; mypy does not know its types."""
    return importlib.import_module("torch")


class Device:
    """A GPU, or the CPU in a rehearsal.

    On the CPU, work is done when a call returns: streams do nothing, and events have passed.

    Args:
        name: ``cpu``, ``cuda`` or ``cuda:INDEX``.
    """

    def __init__(self, name: str) -> None:
        self.torch = load_torch()
        kind, _, index = name.partition(":")
        self.is_cuda = kind == CUDA
        self.index = int(index or 0)
        self.name = f"{kind}:{self.index}" if self.is_cuda else kind

    def enter(self) -> None:
        """Let this thread use the device; an ``EnterThread`` of kvferry.

        ``set_device`` alone does nothing for device 0, on which every thread begins, and leaves the
        thread without a context. An operation makes the context current, as in vLLM.
        """
        if self.is_cuda:
            self.torch.cuda.set_device(self.index)
            self.torch.zeros(1, device=self.name)

    def new_stream(self) -> Any:
        """Return a new stream of high priority; ``None`` on the CPU."""
        return self.torch.cuda.Stream(device=self.name, priority=-1) if self.is_cuda else None

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Within the context, torch enqueues work on a stream."""
        if stream is None:
            yield
            return
        with self.torch.cuda.stream(stream):
            yield

    def record(self) -> Callable[[], bool]:
        """Mark the current stream, and return a function that tells whether the mark has passed."""
        if not self.is_cuda:
            return lambda: True
        event = self.torch.cuda.Event()
        event.record()
        passed: Callable[[], bool] = event.query
        return passed

    def wait(self, stream: Any = None) -> None:
        """Wait for the work on a stream; for that of the whole device if no stream is given."""
        if stream is not None:
            stream.synchronize()
        elif self.is_cuda:
            self.torch.cuda.synchronize(self.index)

    def zeros(self, nbytes: int) -> Any:
        """Return bytes of zeros, as a tensor of 32-bit words."""
        tensor = self.torch.zeros(nbytes // 4, dtype=self.torch.int32, device=self.name)
        self.wait()
        return tensor

    def spin(self, seconds: float) -> None:
        """Enqueue a kernel that takes about so many seconds and one multiprocessor; CUDA only."""
        properties = self.torch.cuda.get_device_properties(self.index)
        kilohertz = getattr(properties, "clock_rate", 1_900_000)
        self.torch.cuda._sleep(int(seconds * kilohertz * 1000))

    def describe(self) -> str:
        """Return the name of the GPU's model, or ``CPU``."""
        return self.torch.cuda.get_device_name(self.index) if self.is_cuda else "CPU"


@dataclass(slots=True, eq=False)
class BusyDevice:
    """Within the context, matrix products run one after the other on the default stream.

    Attributes:
        device: the device.
        products: how many were enqueued.
    """

    device: Device
    products: int = 0
    _stopped: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> BusyDevice:
        self._thread = threading.Thread(target=self._run, name="gpu-check-matmul")
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        self.device.enter()
        torch, size = self.device.torch, 8192 if self.device.is_cuda else 64
        dtype = torch.bfloat16 if self.device.is_cuda else torch.float32
        left = torch.randn(size, size, device=self.device.name).to(dtype)
        out = torch.empty_like(left)
        enqueued: list[Callable[[], bool]] = []
        while not self._stopped.is_set():
            torch.matmul(left, left, out=out)
            self.products += 1
            enqueued.append(self.device.record())
            while len(enqueued) > 8 and not enqueued[-8]() and not self._stopped.is_set():
                time.sleep(0.0005)
            if not self.device.is_cuda:
                time.sleep(0.005)  # the endpoint's thread needs the interpreter
            del enqueued[:-8]
