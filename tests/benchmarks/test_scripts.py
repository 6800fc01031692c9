"""Every benchmark runs and writes valid rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.testing.memory import available
from tests.benchmarks.scripts import quick_rows, run_script

nixl = pytest.mark.nixl
limit = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def no_gpu() -> None:
    """Skip the test where there is a GPU."""
    if available("cuda"):
        pytest.skip("there is a GPU")


def test_drivers_with_loopback_alone(tmp_path: Path) -> None:
    found = quick_rows("drivers", tmp_path, "--driver", "loopback")
    sections = {row["section"] for row in found}
    assert {
        "loopback, one process",
        "loopback, two processes",
        "loopback, two processes, pages of 4 KiB",
        "latency between two processes",
    } <= sections
    assert [row["section"] for row in found if row["target"]] == ["loopback, two processes"] * 2


@nixl
@limit
def test_drivers_with_nixl(tmp_path: Path) -> None:
    found = quick_rows("drivers", tmp_path, "--driver", "loopback", "--driver", "nixl")
    beside = {row["of"] for row in found if row["section"] == "loopback, two processes"}
    alone = "speed of process_vm_readv alone"
    assert beside == {"speed of memcpy", "speed of NIXL's own calls", alone}


def test_drivers_with_writes(tmp_path: Path) -> None:
    found = quick_rows("drivers", tmp_path, "--driver", "loopback", "--op", "write")
    assert any(row["case"].startswith("write of ") for row in found)
    assert not any(row["target"] for row in found)


@pytest.mark.vllm
@nixl
@limit
def test_end_to_end_with_loopback(tmp_path: Path) -> None:
    found = quick_rows("end_to_end", tmp_path, "--driver", "loopback")
    beside = {"loopback, 2 at once", "loopback, 2 at once, NIXL's progress thread asleep"}
    assert {row["case"] for row in found} == beside


@limit
@pytest.mark.parametrize(
    "script",
    [
        pytest.param("planning", marks=pytest.mark.vllm),
        pytest.param("handshake", marks=[nixl, pytest.mark.vllm]),
        pytest.param("request", marks=pytest.mark.vllm),
        pytest.param("request_profile", marks=pytest.mark.vllm),
        pytest.param("steps", marks=pytest.mark.vllm),
        pytest.param("channel", marks=pytest.mark.vllm),  # slow: a thousand clients
        pytest.param("cold_start", marks=pytest.mark.vllm),  # slow: many clients
        pytest.param("replies", marks=pytest.mark.vllm),  # slow: many hostile engines
        pytest.param("orphaned", marks=pytest.mark.vllm),
        pytest.param("early", marks=pytest.mark.vllm),
        pytest.param("staging", marks=pytest.mark.vllm),
        pytest.param("second_turn", marks=pytest.mark.routers),  # needs vLLM's source
        "fence",
        "known_producers",
        "proofs",
        pytest.param("nixl", marks=nixl),
        pytest.param("ucx", marks=[nixl, pytest.mark.ucx]),
    ],
)
def test_script_runs_quickly(script: str, tmp_path: Path) -> None:
    assert quick_rows(script, tmp_path)


@pytest.mark.usefixtures("no_gpu")
def test_gpu_script_without_gpu() -> None:
    done = run_script("gpu", "--quick")
    assert done.returncode == 3
    assert "nothing was measured" in done.stdout or "no GPU was looked for" in done.stdout


def test_gpu_script_has_staged_loads_beside_direct_ones(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = quick_rows("gpu", tmp_path, "--near=cpu", "--far=cpu", "--driver=loopback", "--staged")
    direct, staged = (
        [row["case"] for row in found if row["section"] == f"loopback, cpu from cpu{which}"]
        for which in ("", ", staged")
    )
    assert direct == staged
    assert len(found) == len(direct) + len(staged)


@pytest.mark.usefixtures("no_gpu")
def test_page_names_the_part_that_cannot_run(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    results, page = tmp_path / "bench.json", tmp_path / "docs" / "performance.md"
    done = run_script("everything", "--only", "gpu", "--results", str(results), "--page", str(page))
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(json.loads(results.read_text(encoding="utf-8"))) == {"gpu"}
    assert "VRAM to VRAM (`benchmarks/gpu.py`): " in page.read_text(encoding="utf-8")
