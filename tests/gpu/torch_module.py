"""A stand-in for torch's module of a kind of device: two devices, and work that is done late.

As with CUDA, each thread has a device of its own, which is 0 until the thread chooses another, and
a call on a device makes a context there. ``strays`` tells which threads used a device that they had
not chosen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class StandInStream:
    """A stream; ``priority`` as torch's, below 0 for a high one."""

    device: int
    priority: int = 0
    idle_at: float = 0.0


@dataclass(slots=True, eq=False)
class StandInEvent:
    """A mark on a stream."""

    module: StandInDevices
    reached_at: float = 0.0

    def record(self, stream: StandInStream | None = None) -> None:
        self.module.use("Event.record")
        self.reached_at = (stream or self.module.current_stream()).idle_at

    def query(self) -> bool:
        self.module.use("Event.query")
        return time.monotonic() >= self.reached_at

    def synchronize(self) -> None:
        self.module.use("Event.synchronize")
        time.sleep(max(0.0, self.reached_at - time.monotonic()))


@dataclass(slots=True, eq=False)
class StandInDevices:
    """Stands in for ``torch.cuda``, for its two devices; enqueued work lasts ``lasts`` seconds.

    ``strays`` are threads that used a device without choosing it, each with what they called.
    """

    strays: list[tuple[str, str]] = field(default_factory=list)
    chosen: dict[str, int] = field(default_factory=dict)
    streams: list[StandInStream] = field(default_factory=list)
    _default: StandInStream = field(default_factory=lambda: StandInStream(0))
    _local: threading.local = field(default_factory=threading.local)

    def set_device(self, device: Any) -> None:
        self._local.device = getattr(device, "index", device)
        self.chosen[threading.current_thread().name] = self._local.device

    def current_device(self) -> int:
        index: int = getattr(self._local, "device", 0)
        return index

    def use(self, what: str) -> None:
        """Note a call on the device by this thread."""
        if not hasattr(self._local, "device"):
            self.strays.append((threading.current_thread().name, what))

    def enqueue(self, seconds: float) -> None:
        """Put work on the current stream that is done in some seconds."""
        self.use("enqueue")
        stream = self.current_stream()
        stream.idle_at = max(stream.idle_at, time.monotonic()) + seconds

    def current_stream(self, device: object = None) -> StandInStream:
        stream: StandInStream = getattr(self._local, "stream", self._default)
        return stream

    def Event(self, **options: object) -> StandInEvent:
        return StandInEvent(self)

    def Stream(self, device: Any = None, priority: int = 0) -> StandInStream:
        self.use("Stream")
        made = StandInStream(getattr(device, "index", 0) or 0, priority)
        self.streams.append(made)
        return made

    @contextmanager
    def stream(self, stream: StandInStream) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before
