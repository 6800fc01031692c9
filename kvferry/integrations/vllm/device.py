"""What the device of the caches needs: each thread's choice of it, and marks of enqueued work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvferry.core.memory import CPU
from kvferry.core.transport import EnterThread, enter_nothing

if TYPE_CHECKING:
    import torch


def thread_setup(device: torch.device) -> EnterThread:
    """Return what every thread that uses a device must do first: choose the device.

    A new thread is on device 0, and without a context of CUDA. Its first call would make a context
    on device 0, which takes some 500 MB there; and UCX does without NVLink if it connects in a
    thread without a context.

    Args:
        device: the device of the caches, with its index.
    """
    if device.type == CPU:
        return enter_nothing

    from vllm.platforms import current_platform

    return partial(current_platform.set_device, device)


def current_device(kind: str) -> torch.device:
    """Return the device that the calling thread has chosen, with its index.

    Args:
        kind: the device's type, as torch names it.
    """
    import torch

    if kind == CPU:
        return torch.device(CPU)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def work_marker(device: torch.device) -> Callable[[], Callable[[], bool] | None]:
    """Return a function that marks the work enqueued so far on a device's current stream.

    Args:
        device: the device of the caches.

    Returns:
        A function that marks the work and returns a second function, which tells whether that work
        is done. On CPUs it returns ``None`` instead: work is done when the call that does it ends.
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
