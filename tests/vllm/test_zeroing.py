"""Zeroing through torch, which is how it is done on a device: here it must do what the CPU does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.memory import region_of
from kvferry.core.planner.unwritten import Spans, zero_cpu
from kvferry.integrations.vllm import device
from kvferry.integrations.vllm.device import device_zero_function, zero_function

NBYTES = 4099
POISON = 0xAB


def _memory() -> torch.Tensor:
    return torch.full((NBYTES,), POISON, dtype=torch.uint8)


def _spans(memories: list[torch.Tensor], cuts: list[list[int]], unit: int) -> list[Spans]:
    """Every other stretch between the cuts of each memory, in multiples of ``unit``."""
    spans: list[Spans] = []
    for memory, places in zip(memories, cuts, strict=True):
        edges = [place * unit for place in sorted(set(places))]
        if found := [(a, b - a) for a, b in list(pairwise(edges))[::2]]:
            table = np.array(found, dtype=np.int64)
            spans.append(Spans(region=region_of(memory), offsets=table[:, 0], nbytes=table[:, 1]))
    return spans


@given(data=st.data(), unit=st.sampled_from([1, 2, 48, 256]))
def test_torch_zeroes_what_the_cpu_does(data: st.DataObject, unit: int) -> None:
    places = st.lists(st.integers(0, NBYTES // unit), max_size=12)
    cuts = [data.draw(places), data.draw(places)]
    one, other = [_memory(), _memory()], [_memory(), _memory()]
    zero_cpu(_spans(one, cuts, unit))
    device_zero_function(other)(_spans(other, cuts, unit))
    for left, right in zip(one, other, strict=True):
        assert left.tolist() == right.tolist()


def test_views_of_one_buffer_are_one_memory() -> None:
    buffer = _memory()[:4096].view(4, 1024)
    spans = _spans([buffer], [[1, 3]], 1024)
    device_zero_function([buffer[0], buffer[2]])(spans)
    assert buffer.sum(dim=1).tolist() == [1024 * POISON, 0, 0, 1024 * POISON]


def test_cpu_memory_needs_no_torch() -> None:
    assert zero_function([_memory()]) is zero_cpu


def test_zeroing_is_enqueued_on_a_stream_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, seen = _memory(), []

    @contextmanager
    def awaited(stream: device.HighPriorityStream) -> Iterator[None]:
        yield
        seen.append(memory.tolist())

    monkeypatch.setattr(device.HighPriorityStream, "awaited", awaited)
    device_zero_function([memory])(_spans([memory], [[1, 2]], 256))
    assert seen == [memory.tolist()]  # nothing was enqueued elsewhere, or later
    assert memory[256:512].sum() == 0
