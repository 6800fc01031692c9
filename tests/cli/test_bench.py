"""``kvferry bench`` as a user runs it, and its cases and results."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cli.bench import run
from kvferry.cli.bench.grid import BenchError, Case, options_of, sizes_of
from kvferry.cli.bench.measure import Result
from kvferry.core.errors import KVFerryError
from kvferry.core.memory import Region
from tests.cli.command import COMMAND, install_drivers, run_kvferry

SMALL_GRID = ("--size", "8K,64K", "--block", "4K,64K", "--seconds", "0.1")

DRIVERS_CODE = """
import os
import sys
from ctypes import memmove
from dataclasses import replace

from kvferry.core.errors import TransportError
from kvferry.core.transport import State, Status
from kvferry.drivers.loopback import LoopbackTransport


class Flipping(LoopbackTransport):
    '''Changes the first byte that it reads.'''

    def read(self, peer, copies, notify=None):
        transfer = super().read(peer, copies, notify)
        memmove(int(copies.local[0]), b"\\x00", 1)
        return transfer


class Swapping(LoopbackTransport):
    '''Reads blocks from the wrong places.'''

    def read(self, peer, copies, notify=None):
        return super().read(peer, replace(copies, remote=copies.remote[::-1].copy()), notify)


class Endless(LoopbackTransport):
    '''Prints its pid and its first read to stderr, and never ends a transfer.'''

    def __init__(self):
        super().__init__()
        print(os.getpid(), file=sys.stderr, flush=True)

    def read(self, peer, copies, notify=None):
        print("reading", file=sys.stderr, flush=True)
        return super().read(peer, copies, notify)

    def poll(self, transfers):
        return [Status(state=State.PENDING) for _ in transfers]


class Failing(LoopbackTransport):
    '''Fails every transfer.'''

    def poll(self, transfers):
        return [Status(state=State.FAILED, error=TransportError("no luck")) for _ in transfers]


class Elsewhere(LoopbackTransport):
    '''Does not reach CPU memory.'''

    @property
    def capabilities(self):
        return replace(super().capabilities, memory=frozenset({"cuda"}))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    names = ("Flipping", "Swapping", "Endless", "Failing", "Elsewhere")
    return install_drivers(tmp_path, DRIVERS_CODE, **{name.lower(): name for name in names})


def bench(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_kvferry(environment, "bench", *arguments)


def test_every_case_is_measured_and_plotted(environment: dict[str, str], tmp_path: Path) -> None:
    picture = tmp_path / "speed.svg"
    plot = ("--plot", str(picture)) if find_spec("matplotlib") else ()
    ran = bench(environment, "loopback", *SMALL_GRID, "--json", *plot)
    assert (ran.returncode, ran.stderr) == (0, "")
    record = json.loads(ran.stdout)
    assert record["conditions"]["driver"] == "loopback"
    rows: list[dict[str, Any]] = record["results"]
    found = [(r["size"] >> 10, r["block"] >> 10, r["scattered"]) for r in rows]
    assert found == [(8, 4, True), (8, 4, False), (64, 4, True), (64, 4, False), (64, 64, False)]
    for row in rows:
        assert row["copies"] * row["block"] == row["size"]
        assert row["gb_per_s"] == pytest.approx(row["size"] / row["seconds"] / 1e9, rel=1e-3)
        assert row["ratio"] == pytest.approx(row["gb_per_s"] / row["memcpy_gb_per_s"], rel=1e-2)
        assert row["us_per_copy"] == pytest.approx(row["seconds"] / row["copies"] * 1e6, rel=1e-3)
    if plot:
        texts = {text.strip() for text in ET.parse(picture).getroot().itertext() if text.strip()}
        assert {"scattered", "in a row", "8 KiB", "64 KiB"} <= texts


def test_table_fits_80_columns(environment: dict[str, str]) -> None:
    narrow = environment | {"COLUMNS": "80"}
    ran = bench(narrow, "loopback", *SMALL_GRID, "--option", "threads=1")
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert lines[0].split()[:4] == ["order", "size", "block", "copies"]
    assert lines[1].split()[:6] == ["scattered", "8", "KiB", "4", "KiB", "2"]
    assert max(map(len, lines)) <= 80
    assert "options: {'threads': 1}" in ran.stdout


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        ("flipping", "bytes are wrong after a read"),
        ("swapping", "bytes are wrong after a read"),
        ("failing", "failed: no luck"),
        ("elsewhere", "reaches cuda memory here, and asked for is cpu"),
    ],
)
def test_wrong_bytes_and_failures_are_reported(
    environment: dict[str, str], driver: str, words: str
) -> None:
    ran = bench(environment, driver, *SMALL_GRID)
    assert ran.returncode == 1
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"driver": "nonsense"}, "no driver 'nonsense' is installed"),
        ({"options": ["nonsense=1"]}, "nonsense"),
        ({"options": ["threads"]}, "write KEY=VALUE"),
        ({"sizes": "4Q"}, "--size: '4Q' is no size"),
        ({"sizes": "0"}, "no size"),
        ({"blocks": "1T"}, "--block: '1T'"),
        ({"sizes": "4K", "blocks": "64K"}, "no size is as large as a block"),
        ({"sizes": "64G", "blocks": "8"}, "at most"),
        ({"memory": "cuda"}, "asked for is cuda"),
        ({"plot": Path("picture.jpeg2")}, "must end in .svg"),
        ({"plot": Path("no/such/folder/picture.svg")}, "is no folder"),
    ],
)
def test_invalid_arguments_are_refused_before_processes_start(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(KVFerryError, match=words):
        run(**{"driver": "loopback"} | arguments)


def test_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchError, match=r"pip install 'kvferry\[plot\]'"):
        run(driver="loopback", plot=Path("picture.svg"))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_both_processes(environment: dict[str, str], signum: signal.Signals) -> None:
    with endless_run(environment) as (process, far):
        if signum == signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, signum)  # a terminal sends it to both processes
        _, said = process.communicate(timeout=60)
        assert "Traceback" not in said
        assert select.select([far], [], [], 60)[0]
    if signum == signal.SIGINT:
        assert process.returncode == 130
        assert "both processes have been ended" in said


@contextmanager
def endless_run(environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield the process of a run that does not end, and a pidfd of its other process."""
    process = subprocess.Popen(
        [*COMMAND, "bench", "endless", *SMALL_GRID],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    pids = {int(process.stderr.readline()) for _ in range(2)}
    (other,) = pids - {process.pid}
    far = os.pidfd_open(other)
    try:
        assert process.stderr.readline() == "reading\n"
        yield process, far
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        os.close(far)


def test_size_suffixes_are_binary() -> None:
    assert sizes_of("64K, 4096,1MiB,2g,4k", "--size") == [4096, 1 << 16, 1 << 20, 2 << 30]


def test_option_values_are_json_or_text() -> None:
    said = ["threads=4", "backend=UCX", 'backend_options={"num_threads": 2}', "telemetry=true"]
    assert options_of(said) == {
        "threads": 4,
        "backend": "UCX",
        "backend_options": {"num_threads": 2},
        "telemetry": True,
    }


@settings(max_examples=30)
@given(
    block=st.integers(1, 300),
    count=st.integers(1, 100),
    rest=st.integers(0),
    scattered=st.booleans(),
)
def test_case_moves_every_block_once(block: int, count: int, rest: int, scattered: bool) -> None:
    total = block * count + rest % block
    case = Case(size=total // block * block, block=block, scattered=scattered)
    local, remote = (Region(address=base, nbytes=total) for base in (4096, 1 << 20))
    batch = case.batch(local, remote)
    assert batch.total == case.size
    for starts, region in ((batch.local, local), (batch.remote, remote)):
        assert np.array_equal(np.sort(starts), region.address + np.arange(count) * block)


def test_results_are_computed_from_seconds() -> None:
    case = Case(size=10**6, block=1000, scattered=True)
    result = Result(case=case, rounds=3, seconds=1e-3, memcpy_seconds=2.5e-4)
    assert result.gb_per_s == pytest.approx(1.0)
    assert result.us_per_copy == pytest.approx(1.0)
    assert result.memcpy_gb_per_s == pytest.approx(4.0)
    assert result.ratio == pytest.approx(0.25)
