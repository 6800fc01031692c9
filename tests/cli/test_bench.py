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
from contextlib import closing
from ctypes import memmove
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cli.bench import measure
from kvferry.cli.bench.measure import (
    Bench,
    BenchError,
    Case,
    Result,
    far_process,
    near_buffer,
    options_of,
    sizes_of,
)
from kvferry.cli.formatting import size
from kvferry.core.errors import TransportError
from kvferry.core.memory import Region
from kvferry.core.transport import PeerId, State, Status, TransferId, Transport
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing.peers import Process
from tests.cli.command import COMMAND, Command, install_drivers

SMALL_GRID = ("--size", "8K,64K", "--block", "4K,64K", "--seconds", "0.1")


def test_every_case_is_measured_and_plotted(command: Command, tmp_path: Path) -> None:
    picture = tmp_path / "speed.svg"
    plot = ("--plot", str(picture)) if find_spec("matplotlib") else ()
    ran = command.run("bench", "loopback", *SMALL_GRID, "--json", *plot)
    assert (ran.status, ran.err) == (0, "")
    record = json.loads(ran.out)
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


@pytest.mark.parametrize("width", [80, 50])
def test_table_fits_a_terminal(command: Command, width: int) -> None:
    ran = command.run("bench", "loopback", *SMALL_GRID, "--option", "threads=1", width=width)
    assert ran.status == 0
    lines = [line.split() for line in ran.out.splitlines()]
    assert max(map(len, ran.out.splitlines())) <= width
    if width == 80:
        assert lines[0][:4] == ["order", "size", "block", "copies"]
        assert lines[1][:6] == ["scattered", "8", "KiB", "4", "KiB", "2"]
    else:
        assert lines[:2] == [["order", "scattered"], ["size", "8", "KiB"]]
    assert "options: {'threads': 1}" in ran.words


class Flawed(LoopbackTransport):
    """Reads a wrong byte, reads from wrong places, or ends no transfer as it should."""

    def __init__(self, flaw: str, status: Status | None = None) -> None:
        super().__init__()
        self._flaw, self._status = flaw, status

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        if self._flaw == "swaps":
            copies = replace(copies, remote=copies.remote[::-1].copy())
        transfer = super().read(peer, copies, notify)
        if self._flaw == "flips":
            memmove(int(copies.local[0]), b"\x00", 1)
        return transfer

    def poll(self, transfers: Any) -> list[Status]:
        return [self._status or status for status in super().poll(transfers)]


@pytest.fixture(scope="module")
def far() -> Iterator[Process]:
    """The second process, over loopback."""
    with far_process("loopback", {}, "cpu", 8192) as process:
        yield process


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        (Flawed("flips"), "bytes are wrong after a read"),
        (Flawed("swaps"), "bytes are wrong after a read"),
        (
            Flawed("", Status(state=State.FAILED, error=TransportError("no luck"))),
            "failed: no luck",
        ),
        (Flawed("", Status(state=State.PENDING)), "has not ended after 0 s"),
    ],
    ids=range(4),
)
def test_wrong_bytes_and_failures_are_reported(
    far: Process, monkeypatch: pytest.MonkeyPatch, driver: Transport, words: str
) -> None:
    monkeypatch.setattr(measure, "DEADLINE_SECONDS", 0.01)
    with closing(driver):
        measured = Bench(driver, far, near_buffer("cpu", 8192), lambda _: None)
        with pytest.raises(BenchError, match=words):
            measured.measure(Case(size=8192, block=4096, scattered=True), 0.0)


def test_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    picture = pytest.importorskip("kvferry.cli.bench.picture")
    case = Case(size=8, block=8, scattered=True)
    result = Result(case=case, rounds=1, seconds=1.0, memcpy_seconds=1.0)
    (path := tmp_path / "picture.svg").mkdir()
    with pytest.raises(BenchError, match=r"picture\.svg cannot be written: Is a directory"):
        picture.draw(path, "a title", [result])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "no driver 'nonsense' is installed"),
        (["loopback", "--option", "nonsense=1"], "nonsense"),
        (["loopback", "--option", "threads"], "write KEY=VALUE"),
        (["loopback", "--size", "4Q"], "--size: '4Q' is no size"),
        (["loopback", "--size", "0"], "no size"),
        (["loopback", "--block", "1T"], "--block: '1T'"),
        (["loopback", "--size", "4K", "--block", "64K"], "no size is as large as a block"),
        (["loopback", "--size", "64G", "--block", "8"], "at most"),
        (["loopback", "--memory", "cuda"], "--memory cuda: no buffer of"),
        (["loopback", "--plot", "picture.jpeg2"], "must end in .svg"),
    ],
)
def test_invalid_arguments_are_refused_before_processes_start(
    command: Command, arguments: list[str], words: str
) -> None:
    ran = command.run("bench", *arguments)
    assert (ran.status, ran.out) == (1, "")
    assert words in ran.err


def test_plot_without_matplotlib_names_the_extra(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = command.run("bench", "loopback", "--plot", "picture.svg").err
    assert "pip install 'kvferry[plot]'" in said


ENDLESS = """
import os
import sys

from kvferry.core.transport import State, Status
from kvferry.drivers.loopback import LoopbackTransport


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
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_both_processes(tmp_path: Path, signum: signal.Signals) -> None:
    with subprocess.Popen(
        [*COMMAND, "bench", "endless", *SMALL_GRID],
        env=install_drivers(tmp_path, ENDLESS, endless="Endless"),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        pids = {int(process.stderr.readline()) for _ in range(2)}
        (other,) = pids - {process.pid}
        far = os.pidfd_open(other)
        assert process.stderr.readline() == "reading\n"
        if signum == signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, signum)  # a terminal sends it to both processes
        _, said = process.communicate(timeout=60)
        assert "Traceback" not in said
        assert select.select([far], [], [], 60)[0]
        os.close(far)
    if signum == signal.SIGINT:
        assert process.returncode == 130
        assert "kvferry: interrupted" in said


def test_options_are_parsed_and_sizes_written() -> None:
    assert sizes_of("64K, 4096,1MiB,2g,4k", "--size") == [4096, 1 << 16, 1 << 20, 2 << 30]
    written = [size(nbytes) for nbytes in (0, 1023, 1024, 15 << 19, 1 << 40, 3 << 52)]
    assert written == ["0 B", "1,023 B", "1 KiB", "7.5 MiB", "1 TiB", "12,288 TiB"]
    said = ["threads=4", "backend=UCX", 'options={"num_threads": 2}', "telemetry=true"]
    options = {"threads": 4, "backend": "UCX", "options": {"num_threads": 2}, "telemetry": True}
    assert options_of(said) == options


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
