"""Default options of NIXL's backends, with and without RDMA devices."""

from __future__ import annotations

from pathlib import Path

from kvferry.drivers.nixl.options import NixlOptions, defaults, has_cuda, threads, without_threads


def test_default_options_without_rdma(tmp_path: Path) -> None:
    found = defaults("UCX", tmp_path)
    assert found["num_threads"] == "4"
    assert found.get("split_batch_size") == (None if has_cuda() else "8")


def test_default_options_with_rdma(tmp_path: Path) -> None:
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert defaults("UCX", tmp_path) == {"num_threads": "4"}


def test_other_backends_have_no_default_options(tmp_path: Path) -> None:
    assert defaults("LIBFABRIC", tmp_path) == {}
    assert threads({}) == 0


def test_without_threads_changes_nothing_else() -> None:
    options = NixlOptions(backend_options={"num_threads": 2, "num_workers": 3}, telemetry=True)
    bare = without_threads(options)
    assert bare.backend_options == {"num_threads": 0, "num_workers": 3}
    assert (bare.backend, bare.telemetry) == (options.backend, True)
