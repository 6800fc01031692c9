"""Buffers that tests fill and inspect, and the error for a memory kind that the machine lacks."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.testing.memory import allocate, available, pattern


def fake_torch(devices: int) -> SimpleNamespace:
    """Return the part of torch that tells how many GPUs there are."""
    cuda = SimpleNamespace(is_available=lambda: devices > 0, device_count=lambda: devices)
    return SimpleNamespace(__version__="0.0", cuda=cuda)


@pytest.mark.parametrize(
    ("installed", "memory", "why"),
    [
        (None, "cuda", "torch is not installed"),
        (fake_torch(0), "cuda", "torch 0.0 sees no CUDA device"),
        (fake_torch(2), "cuda:2", "there are 2 CUDA devices, from 0 on"),
    ],
)
def test_missing_device_is_reported_with_remedy(
    monkeypatch: pytest.MonkeyPatch, installed: object, memory: str, why: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", installed)
    with pytest.raises(RuntimeError, match=f"{why}.*or test with memory = 'cpu'"):
        allocate(memory, 4096)


def test_available_memory_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    for devices in (0, 1):
        monkeypatch.setitem(sys.modules, "torch", fake_torch(devices))
        assert [available(kind) for kind in ("cpu", "cuda", "xpu")] == [True, devices > 0, False]


def test_buffer_returns_what_was_put() -> None:
    buffer = allocate("cpu", 4096)
    assert not buffer.get().any()
    buffer.put(pattern(100, 1), 7)
    np.testing.assert_array_equal(buffer.get(7, 100), pattern(100, 1))
    assert buffer.part(7, 100).address == buffer.region.address + 7


def test_memory_may_be_made_by_a_named_function() -> None:
    assert allocate("tests.long.drivers.correct_drivers:OddBuffer", 64).region.kind == "odd"
    with pytest.raises(ImportError, match="has no 'NoBuffer'"):
        allocate("tests.long.drivers.correct_drivers:NoBuffer", 64)
