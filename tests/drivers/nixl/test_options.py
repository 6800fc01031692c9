"""What NIXL's UCX is started with, by what moves the bytes on this machine."""

from __future__ import annotations

from pathlib import Path

from kvferry.drivers.nixl.options import NixlOptions, defaults, has_cuda, threads, without_threads


def test_where_the_cpu_moves_the_bytes_threads_share_few_rows(tmp_path: Path) -> None:
    found = defaults("UCX", tmp_path)
    assert found["num_threads"] == "4"
    assert found.get("split_batch_size") == (None if has_cuda() else "8")


def test_where_a_nic_with_rdma_does_nixl_decides(tmp_path: Path) -> None:
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert defaults("UCX", tmp_path) == {"num_threads": "4"}


def test_other_backends_start_as_nixl_has_them(tmp_path: Path) -> None:
    assert defaults("LIBFABRIC", tmp_path) == {}
    assert threads({}) == 0


def test_without_threads_all_else_is_the_same() -> None:
    options = NixlOptions(backend_options={"num_threads": 2, "num_workers": 3}, telemetry=True)
    bare = without_threads(options)
    assert bare.backend_options == {"num_threads": 0, "num_workers": 3}
    assert (bare.backend, bare.telemetry) == (options.backend, True)
