"""Options of NIXL's backends: defaults with and without RDMA and CUDA, and what the user gives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.errors import DriverError
from kvferry.drivers.cuda import CudaDriver
from kvferry.drivers.nixl import options
from kvferry.drivers.nixl.library import NixlLibrary
from kvferry.drivers.nixl.options import (
    NixlOptions,
    Parameter,
    defaults,
    parameters,
    threads,
)
from tests.gpu.driver_api import StandInCuda


@pytest.mark.parametrize("rdma", [False, True])
def test_default_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rdma: bool) -> None:
    monkeypatch.setattr(options, "find_cuda", lambda: None)
    more = {} if rdma else {"split_batch_size": "8"}
    if rdma:
        (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert defaults("UCX", tmp_path) == {"num_threads": "4", **more}
    assert defaults("LIBFABRIC", tmp_path) == {}
    assert threads({}) == 0


NATIVE = SimpleNamespace(
    getAvailPlugins=lambda: ["UCX", "LIBFABRIC"], getPluginParams=lambda name: ({}, [])
)
LIBRARY = NixlLibrary(
    package="nixl", version="0", api=None, errors=(), lost=OSError, unknown=OSError
)


def started(**options: Any) -> dict[str, str]:
    return parameters(NixlOptions(**options), LIBRARY, NATIVE)


@pytest.fixture
def _with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_cuda", lambda: CudaDriver(StandInCuda()))


@pytest.mark.usefixtures("_with_cuda")
@pytest.mark.parametrize(
    ("given", "config"),
    [
        ({}, "CUDA_IPC_ENABLE_GET_ZCOPY=y"),
        ({"engine_config": ""}, "CUDA_IPC_ENABLE_GET_ZCOPY=y"),
        ({"engine_config": "A=1,B=2"}, "A=1,B=2,CUDA_IPC_ENABLE_GET_ZCOPY=y"),
        ({"engine_config": "A=1,CUDA_IPC_ENABLE_GET_ZCOPY=n"}, None),
    ],
)
def test_reads_by_cuda_ipc_are_enabled_unless_the_user_decides(
    given: dict[str, Parameter], config: str | None
) -> None:
    found = started(backend_options=given)["engine_config"]
    assert found == (config or given["engine_config"])


def test_ucx_has_no_threads_without_a_progress_thread() -> None:
    assert started(progress_thread=False)["num_threads"] == "0"
    assert started()["num_threads"] == "4"
    assert "num_threads" not in started(backend="LIBFABRIC", progress_thread=False)
    with pytest.raises(DriverError, match=r"num_threads is 2, but .* without progress_thread"):
        started(progress_thread=False, backend_options={"num_threads": 2})
