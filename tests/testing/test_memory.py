"""Buffers that tests fill and inspect, and the error for a memory kind that the machine lacks."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.testing.memory import allocate, available, pattern


def test_available_memory_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    for there in (False, True):
        cuda = SimpleNamespace(is_available=lambda there=there: there)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        assert [available(kind) for kind in ("cpu", "cuda", "xpu")] == [True, there, False]


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
