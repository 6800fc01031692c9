"""The device of the caches: threads choose it, drivers must reach it, its bytes are zeroed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.core.memory import CPU, I64Array, region_of
from kvferry.core.planner.unwritten import Spans, zero_cpu
from kvferry.core.transport import EnterThread, Transport, enter_nothing, registry
from kvferry.integrations.vllm.config import Config, ConfigError

if TYPE_CHECKING:
    import torch


INDEX_ROWS = 1 << 20
"""How many rows one launch zeroes at most, which bounds the memory of their indices."""


def thread_setup(device: torch.device) -> EnterThread:
    """Return what every thread that uses a device must do first: choose the device.

    A new thread is on device 0, without a context of CUDA. Its first call would make one there,
    which takes 500 MB; and UCX does without NVLink if it connects in a thread without a context.
    """
    if device.type == CPU:
        return enter_nothing

    from vllm.platforms import current_platform

    return partial(current_platform.set_device, device)


def platform_device() -> torch.device:
    """Return the device of vLLM's platform that the calling thread has chosen."""
    import torch
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    if kind == CPU:
        return torch.device(CPU)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def check_has_streams(device: torch.device) -> None:
    """Raise ``ConfigError`` for a device of which nobody can tell when work on a page is done."""
    import torch

    module = getattr(torch, device.type, None)
    if device.type != CPU and not (hasattr(module, "Stream") and hasattr(module, "Event")):
        raise ConfigError(
            f"torch has no streams and events for {device.type!r}, so nobody can tell when its "
            "pages may be read or were copied: use a device that has them, such as CUDA, ROCm or "
            "XPU"
        )


def work_marker(device: torch.device) -> Callable[[], Callable[[], bool] | None]:
    """Return a function that marks the work enqueued so far on a device's current stream.

    It returns what tells whether that work is done; ``None`` on CPUs, where it always is.
    """
    if device.type == CPU:
        return lambda: None

    import torch

    module = torch.get_device_module(device)

    def mark() -> Callable[[], bool]:
        event = module.Event()
        event.record()
        query: Callable[[], bool] = event.query
        return query

    return mark


class HighPriorityStream:
    """A stream for short work, which waits for no step of the model; on CPUs, nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._done: Any = None

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Enqueue torch's work in the context on this stream; wait for it, also after an error."""
        import torch

        if self._device.type == CPU:
            yield
            return
        module = torch.get_device_module(self._device)
        if self._stream is None:  # made here, on a thread that has chosen the device
            self._stream = module.Stream(device=self._device, priority=-1)
            self._done = module.Event()
        with module.stream(self._stream):
            try:
                yield
            finally:
                self._done.record(self._stream)
                self._done.synchronize()


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as bytes, without a copy; it stays alive with them."""
    import torch

    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def make_transport(
    config: Config, memory: Iterable[str], enter: EnterThread = enter_nothing
) -> Transport:
    """Return a transport of the configured driver; the caller closes it.

    Raises:
        ConfigError: The driver cannot reach one of the kinds of ``memory`` (``Region.kind``).
        DriverError: The driver cannot be used.
    """
    transport = registry.create(config.driver, config.driver_options, enter=enter)
    missing = sorted(set(memory) - transport.capabilities.memory)
    if not missing:
        return transport
    transport.close()
    raise ConfigError(
        f"driver {config.driver!r} cannot reach {', '.join(missing)} memory, where this engine's "
        "cache is: set kv_buffer_device 'cpu', which hands pages over by way of host memory, or "
        "driver to one that can ('kvferry drivers' shows what each can reach)"
    )


def zero_function(caches: Iterable[torch.Tensor]) -> Callable[[list[Spans]], None]:
    """Return a function that zeroes spans of addresses of vLLM's tensors, which it keeps."""
    tensors = list(caches)
    on_cpu = all(tensor.device.type == CPU for tensor in tensors)
    return zero_cpu if on_cpu else device_zero_function(tensors)


def device_zero_function(caches: Iterable[torch.Tensor]) -> Callable[[list[Spans]], None]:
    """Return a function that zeroes spans on any device, through torch, and waits for that."""
    memory = {region_of(tensor): storage_of(tensor) for tensor in caches}
    streams = {tensor.device: HighPriorityStream(tensor.device) for tensor in memory.values()}

    def zero(spans: list[Spans]) -> None:
        for device, stream in streams.items():
            with stream.awaited():
                for each in spans:
                    if memory[each.region].device == device:
                        _zero(memory[each.region], each.offsets, each.nbytes)

    return zero


def _zero(memory: torch.Tensor, offsets: I64Array, lengths: I64Array) -> None:
    """Zero ranges of bytes of a tensor's storage: at ``offsets`` (n,), of ``lengths`` (n,)."""
    import torch

    # Rows as long as possible, so that few indices are needed.
    row = math.gcd(int(np.gcd.reduce(offsets)), int(np.gcd.reduce(lengths)))
    rows = memory[: len(memory) // row * row].view(-1, row)
    first, count = offsets // row, lengths // row
    before = np.cumsum(count) - count
    index = np.repeat(first - before, count) + np.arange(int(count.sum()))
    for start in range(0, len(index), INDEX_ROWS):
        chunk = torch.from_numpy(index[start : start + INDEX_ROWS])
        rows.index_fill_(0, chunk.to(memory.device), 0)
