"""Copies between a cache and its pool: whole pages, in each way that devices allow."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import CopyError
from kvferry.core.layout import Layout
from kvferry.core.layout.host_page_format import HostPageFormat
from kvferry.core.layout.paged_layout import paged_layout
from kvferry.core.memory import region_of
from kvferry.integrations.vllm import host_pool
from kvferry.integrations.vllm.config import ConfigError
from kvferry.integrations.vllm.device import storage_of
from kvferry.integrations.vllm.host_pool import HostPool
from tests.core.layouts import walk
from tests.gpu import openreg
from tests.gpu.torch_module import StandInDevices
from tests.waiting import eventually

BLOCKS, PAGES = 9, 6
SECONDS = 60.0
OPENREG = pytest.param("openreg", marks=openreg.NEEDED)
KINDS = ("cpu", "cuda", OPENREG)
"""Host memory; a stand-in for a device, whose memory is the host's; and PyTorch's own."""

STUCK = """
import threading

import torch

from kvferry.core.layout import Layout
from kvferry.core.layout.host_page_format import HostPageFormat
from kvferry.integrations.vllm.host_pool import HostPool

begun = threading.Event()


def stuck(blocks, pages, *, out):
    begun.set()
    threading.Event().wait()


form = HostPageFormat.of(Layout(regions=(), groups=(), fields=()))
pool = HostPool([], form, 2, device=torch.device("cpu"))
pool._copy = stuck
pool.out([1], [1])
begun.wait()
"""
"""A process whose device never ends a copy."""


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> StandInDevices:
    stand_in = StandInDevices()

    def module(device: torch.device) -> object:
        return openreg.module() if device.type == "openreg" else stand_in

    monkeypatch.setattr(torch, "get_device_module", module)
    return stand_in


def caches(
    dtype: str = "float32", order: tuple[int, ...] = (0, 1, 2, 3, 4), kind: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Two layers' K in two storages, of which one has a V, too; (page, token, head, element)."""
    memory = openreg.device() if kind == "openreg" else torch.device("cpu")
    shape = (BLOCKS, 4, 2, 3)

    def storage(layers: int) -> torch.Tensor:
        sizes = [(layers, *shape)[axis] for axis in order]
        count = int(np.prod(sizes))
        made = torch.randint(-100, 100, (count,)).to(getattr(torch, dtype)).to(memory)
        return made.view(sizes).permute(*np.argsort(order).tolist())

    one, other = storage(2), storage(1)
    return {"0.k": one[0], "0.v": one[1], "1.k": other[0]}


def pool_of(
    tensors: dict[str, torch.Tensor], kind: str, **options: Any
) -> tuple[HostPool, Layout, HostPageFormat]:
    cache = paged_layout(tensors, ("page", "token", "head", "element"))
    form = HostPageFormat.of(cache)
    device = torch.device(kind, 0) if kind != "cpu" else torch.device(kind)
    pool = HostPool(tensors.values(), form, PAGES, device=device, **options)
    return pool, pool.layout, form


def pages_of(
    layout: Layout, count: int, tensors: Iterable[torch.Tensor] = ()
) -> list[dict[str, bytes]]:
    """The bytes of each field in each page, by memory; that of tensors is copied whole."""
    memories = {region_of(tensor): storage_of(tensor).cpu().numpy() for tensor in tensors}
    for region in set(layout.regions) - memories.keys():
        memories[region] = np.frombuffer(
            ctypes.string_at(region.address, region.nbytes), dtype=np.uint8
        )
    pages: list[dict[str, bytes]] = [{} for _ in range(count)]
    for field in layout.fields:
        memory = memories[layout.regions[field.region]]
        for page, places in zip(pages, walk(field), strict=True):
            page[field.key] = memory[places].tobytes()
    return pages


def _choose(devices: StandInDevices) -> Callable[[], None]:
    def enter() -> None:
        assert threading.current_thread().name.startswith("kvferry-copy-")
        devices.set_device(0)

    return enter


pairs = st.integers(0, PAGES).flatmap(
    lambda count: st.tuples(
        st.permutations(range(BLOCKS)).map(lambda ids: ids[:count]),
        st.permutations(range(PAGES)).map(lambda ids: ids[:count]),
    )
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_copies_move_pages_and_nothing_else(
    devices: StandInDevices, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str
) -> None:
    monkeypatch.setattr(host_pool, "BATCH_BYTES", 3 * 4 * 2 * 3 * 4)  # a page or a few at once

    @settings(max_examples=15)
    @given(chosen=pairs, back=pairs, order=st.permutations(range(4)))
    def search(
        chosen: tuple[list[int], list[int]], back: tuple[list[int], list[int]], order: list[int]
    ) -> None:
        tensors = caches(dtype, (*order, 4), kind)
        pool, host, form = pool_of(tensors, kind, pin=kind == "openreg")
        before = pages_of(form.cache, BLOCKS, tensors.values())
        eventually(pool.out(*chosen))
        held = pages_of(host, PAGES)
        for block, page in zip(*chosen, strict=True):
            assert held[page] == before[block]
        assert pages_of(form.cache, BLOCKS, tensors.values()) == before
        blocks, pages = back
        eventually(pool.into(pages, blocks))
        assert pages_of(host, PAGES) == held
        expected = list(before)
        for block, page in zip(*back, strict=True):
            expected[block] = held[page]
        assert pages_of(form.cache, BLOCKS, tensors.values()) == expected
        pool.close()

    search()


def test_a_rank_without_a_cache_copies_nothing(devices: StandInDevices) -> None:
    """Its engine's orders name blocks of the other ranks, too."""
    form = HostPageFormat.of(Layout(regions=(), groups=(), fields=()))
    pool = HostPool([], form, PAGES, device=torch.device("cuda", 0), enter=_choose(devices))
    eventually(pool.out([1], [2]))
    eventually(pool.into([2], [1]))
    pool.close()


@pytest.fixture
def copying(devices: StandInDevices) -> Iterator[Callable[[Callable[..., None]], HostPool]]:
    """A pool on a stand-in for a device, whose copies are a function's."""
    pool, _, _ = pool_of(caches(), "cuda", enter=_choose(devices))

    def made(copy: Callable[..., None]) -> HostPool:
        pool._copy = copy
        return pool

    yield made
    pool.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_is_awaited_on_a_stream_of_its_own(
    devices: StandInDevices, copying: Any, fails: bool
) -> None:
    """The calling thread waits for nothing, and the copy for none of the engine's work."""
    may_begin = threading.Event()

    def copy(*_: object, out: bool) -> None:
        assert may_begin.wait(SECONDS)
        devices.enqueue(0.2)
        if fails:
            raise RuntimeError("no memory")

    devices.set_device(0)
    devices.enqueue(600.0)
    began = time.monotonic()
    passed = copying(copy).out([1], [2])
    assert not passed()
    may_begin.set()
    said = "the device cannot copy pages: no memory"
    with pytest.raises(CopyError, match=said) if fails else nullcontext():
        eventually(passed)
    assert 0.2 <= time.monotonic() - began < 600.0
    assert devices.strays == []
    assert [stream.priority for stream in devices.streams] == [-1]


@pytest.mark.parametrize("kind", ["cpu", OPENREG])
def test_a_pool_copies_on_after_an_error(devices: StandInDevices, kind: str) -> None:
    tensors = caches(kind=kind)
    pool, host, form = pool_of(tensors, kind)
    for failing in (pool.out([1, BLOCKS], [0, 1]), pool.into([0, 1], [1, BLOCKS])):
        with pytest.raises(CopyError, match=r"cannot copy pages: .*out of"):
            eventually(failing)
    before = pages_of(form.cache, BLOCKS, tensors.values())
    eventually(pool.out([3, 4], [5, 1]))
    assert [pages_of(host, PAGES)[page] for page in (5, 1)] == before[3:5]
    pool.close()


def test_copies_of_both_directions_do_not_wait_for_each_other(copying: Any) -> None:
    gate = threading.Event()

    def copy(*_: object, out: bool) -> None:
        assert not out or gate.wait(SECONDS)

    pool = copying(copy)
    slow = pool.out([1], [2])
    eventually(pool.into([3], [4]))
    assert not slow()
    gate.set()


def test_memory_that_cannot_be_pinned_is_used_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = torch.empty

    def refuse(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("cudaHostAlloc failed")
        return real(*shape, **options)

    tensors = caches()
    monkeypatch.setattr(torch, "empty", refuse)
    pool, _, _ = pool_of(tensors, "cpu", pin=True)
    assert not pool.is_pinned
    assert "cannot be pinned (cudaHostAlloc failed)" in caplog.text
    eventually(pool.out([1], [2]))
    pool.close()


def test_memory_that_cannot_be_had_is_refused_with_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*shape: object, **options: object) -> object:
        raise RuntimeError("no memory")

    tensors = caches()
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ConfigError, match=r"staging_bytes: \d+ bytes of host memory .*; set fewer"):
        pool_of(tensors, "cpu", pin=True)


def test_a_copy_that_never_ends_lets_the_process_end() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], check=False, timeout=120)
    assert done.returncode == 0
