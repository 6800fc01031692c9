"""Which accelerators' memory is claimed, by the driver libraries that a machine has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.drivers.cuda import CudaDriver
from kvferry.drivers.nixl import accelerators
from tests.gpu.driver_api import StandInCuda

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that sets which driver libraries are installed, and whether CUDA works."""

    def installed(*libraries: str, cuda: CudaDriver | None = None) -> None:
        def load(name: str) -> str:
            if name not in libraries:
                raise OSError(f"{name}: cannot open shared object file")
            return name

        monkeypatch.setattr("ctypes.CDLL", load)
        monkeypatch.setattr(accelerators, "find_cuda", lambda: cuda)

    return installed


def test_no_kind_is_claimed_without_a_driver_library(install: Install) -> None:
    install()
    assert accelerators.present() == frozenset()


def test_cuda_is_claimed_where_its_driver_starts(install: Install) -> None:
    install("libcuda.so.1", cuda=CudaDriver(StandInCuda()))
    assert accelerators.present() == {"cuda"}


def test_cuda_is_not_claimed_without_a_gpu(install: Install) -> None:
    install("libcuda.so.1")
    assert accelerators.present() == frozenset()


@pytest.mark.parametrize(
    ("library", "kind"),
    [("libhsa-runtime64.so.1", "cuda"), ("libze_loader.so.1", "xpu"), ("libhl-thunk.so", "hpu")],
)
def test_kind_is_claimed_with_its_driver_library(install: Install, library: str, kind: str) -> None:
    install(library)
    assert accelerators.present() == {kind}
