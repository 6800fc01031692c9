"""PyTorch's test device ``openreg``: the host cannot touch its memory, not even by mistake.

Its operators run on the calling thread, so it says nothing about the order of work on streams.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

NEEDED = pytest.mark.skipif(
    importlib.util.find_spec("torch_openreg") is None,
    reason="torch_openreg cannot be imported: take it from PyTorch's sources (test/cpp_extensions/"
    "open_registration_extension), built for the torch that is installed",
)


def device() -> torch.device:
    """Return one of the two devices."""
    import torch

    importlib.import_module("torch_openreg")
    return torch.device("openreg", 0)


def module() -> SimpleNamespace:
    """Return torch's module of the device, with streams and events as those of GPUs have them."""
    import torch

    return SimpleNamespace(
        Stream=torch.Stream,
        Event=partial(torch.Event, "openreg"),
        stream=lambda stream: stream,  # a stream is a context of its own
    )
