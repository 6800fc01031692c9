"""The memory kinds that an agent claims."""

from __future__ import annotations

import pytest

from kvferry.drivers.cuda import CudaDriver
from kvferry.drivers.nixl import agent
from tests.gpu.driver_api import StandInCuda

CUDA = CudaDriver(StandInCuda())


@pytest.mark.parametrize(
    ("libraries", "cuda", "kinds"),
    [
        ([], None, set()),
        (["libcuda.so.1"], CUDA, {"cuda"}),
        (["libcuda.so.1"], None, set()),  # no GPU
        (["libhsa-runtime64.so.1"], None, {"cuda"}),
        (["libze_loader.so.1"], None, {"xpu"}),
        (["libhl-thunk.so"], None, {"hpu"}),
    ],
)
def test_kind_is_claimed_with_its_driver_library(
    monkeypatch: pytest.MonkeyPatch, libraries: list[str], cuda: CudaDriver | None, kinds: set[str]
) -> None:
    def load(name: str) -> str:
        if name not in libraries:
            raise OSError(f"{name}: cannot open shared object file")
        return name

    monkeypatch.setattr("ctypes.CDLL", load)
    monkeypatch.setattr(agent, "find_cuda", lambda: cuda)
    assert agent.accelerators() == kinds
