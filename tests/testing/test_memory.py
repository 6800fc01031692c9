"""Memory that tests fill and inspect themselves; and what is said where there is none of a kind."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.testing.memory import SharedBuffer, allocate, available, pattern


def torch(devices: int) -> SimpleNamespace:
    """As much of torch as is asked whether there is a GPU."""
    cuda = SimpleNamespace(is_available=lambda: devices > 0, device_count=lambda: devices)
    return SimpleNamespace(__version__="0.0", cuda=cuda)


@pytest.mark.parametrize(
    ("installed", "memory", "why"),
    [
        (None, "cuda", "torch is not installed"),
        (torch(0), "cuda", "torch 0.0 sees no CUDA device"),
        (torch(2), "cuda:2", "there are 2 CUDA devices, from 0 on"),
    ],
)
def test_a_device_that_is_not_there_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, installed: object, memory: str, why: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", installed)
    with pytest.raises(RuntimeError, match=f"{why}.*or test with memory = 'cpu'"):
        allocate(memory, 4096)


def test_what_is_available_can_be_mixed_into_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    for devices in (0, 1):
        monkeypatch.setitem(sys.modules, "torch", torch(devices))
        assert [available(kind) for kind in ("cpu", "cuda", "xpu")] == [True, devices > 0, False]


def test_a_buffer_gives_back_what_was_put_into_it() -> None:
    buffer = allocate("cpu", 4096)
    assert not buffer.get().any()
    buffer.put(pattern(100, 1), 7)
    np.testing.assert_array_equal(buffer.get(7, 100), pattern(100, 1))
    assert buffer.part(7, 100).address == buffer.region.address + 7


def test_memory_of_ones_own_is_made_by_a_function() -> None:
    assert allocate("tests.testing.factories:OddBuffer", 64).region.kind == "odd"
    with pytest.raises(ImportError, match="has no 'NoBuffer'"):
        allocate("tests.testing.factories:NoBuffer", 64)


def test_what_one_writes_into_shared_memory_another_that_maps_it_sees() -> None:
    one = SharedBuffer.create(4096)
    other = allocate(f"shared:{one.path}", 4096)
    one.put(pattern(100, 1), 7)
    np.testing.assert_array_equal(other.get(7, 100), pattern(100, 1))
    assert other.region.address != one.region.address
