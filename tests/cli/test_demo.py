"""``kvferry demo`` as a user runs it: real processes, and everything checked from outside."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cli.demo.model import (
    HEADS,
    LAYERS,
    POISON,
    DemoError,
    Shape,
    compute,
    make_cache,
    requests_of,
    scattered_pages,
    shape_of,
    values,
    wrong_bytes,
    wrong_spare_bytes,
)

SECONDS = 110.0

DRIVERS = """
from collections.abc import Sequence
from ctypes import memmove

from kvferry.core.errors import TransferCancelledError
from kvferry.core.transport import Capabilities, State, Status
from kvferry.drivers.loopback import LoopbackTransport


class Flipping(LoopbackTransport):
    '''Gets the first byte of the first larger transfer wrong.'''
    flipped = False

    def read(self, peer, copies, notify=None):
        transfer = super().read(peer, copies, notify)
        if copies.total > 8 and not Flipping.flipped:
            Flipping.flipped = True
            while not super().poll([transfer])[0].state.final:
                pass
            memmove(int(copies.local[0]), b"\\xa5", 1)
        return transfer


class Stuck(LoopbackTransport):
    '''No transfer ends before it is cancelled.'''
    cancelled = frozenset()

    def cancel(self, transfer):
        self.cancelled = self.cancelled | {transfer}
        super().cancel(transfer)

    def poll(self, transfers):
        error = TransferCancelledError("cancelled")
        return [
            Status(state=State.FAILED, error=error)
            if transfer in self.cancelled and status.state.final
            else Status(state=State.PENDING)
            for transfer, status in zip(transfers, super().poll(transfers))
        ]


class Writing(LoopbackTransport):
    '''Cannot read.'''

    @property
    def capabilities(self):
        can = super().capabilities
        from dataclasses import replace

        return replace(can, ops=frozenset({"write"}))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With three more drivers installed, and a folder for temporary files that is empty."""
    site, temporary = tmp_path / "site", tmp_path / "temporary"
    info = site / "kvferry_odd-1.0.dist-info"
    info.mkdir(parents=True)
    temporary.mkdir()
    (site / "odd_drivers.py").write_text(DRIVERS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvferry-odd\nVersion: 1.0\n")
    names = ("Flipping", "Stuck", "Writing")
    entries = "".join(f"{name.lower()} = odd_drivers:{name}\n" for name in names)
    (info / "entry_points.txt").write_text(f"[kvferry.drivers]\n{entries}")
    return os.environ | {
        "PYTHONPATH": str(site),
        "TMPDIR": str(temporary),
        "COLUMNS": "200",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def command(*arguments: str) -> list[str]:
    start = [sys.executable, "-W", "error", "-c", "from kvferry.cli import main; main()", "demo"]
    return [*start, *arguments]


def demo(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it small, and see that nothing is left behind."""
    done = subprocess.run(
        command("--megabytes", "4", *arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
        env=environment,
        cwd=environment["TMPDIR"],
    )
    assert not [pid for pid in pids_in(done.stdout) if Path(f"/proc/{pid}").exists()]
    assert not list(Path(environment["TMPDIR"]).iterdir())
    assert "Traceback" not in done.stderr
    return done


def pids_in(output: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"^ (?:prefill|decode) +\d of \d +(\d+)", output, re.M)]


# From outside.


def test_three_processes_move_every_byte_and_say_how_fast(environment: dict[str, str]) -> None:
    done = demo(environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(set(pids_in(done.stdout))) == 3
    assert done.stdout.count("all right") == 8
    assert "untouched" in done.stdout
    assert "A used ticket tried again is refused" in done.stdout
    assert re.search(r"kvferry +\d+\.\d\d GB/s", done.stdout)
    assert re.search(r"memcpy +\d+\.\d\d GB/s", done.stdout)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("3/HND/16", "NHD/48"), ("1/NHD/32", "NHD/32"), ("4/nhd/24", "hnd/16")],
)
def test_other_shapes_cross_too(environment: dict[str, str], prefill: str, decode: str) -> None:
    done = demo(environment, "--prefill", prefill, "--decode", decode)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("all right") == 8


def test_one_wrong_byte_is_found_and_fails_the_command(environment: dict[str, str]) -> None:
    done = demo(environment, "--driver", "flipping")
    assert done.returncode == 1
    assert done.stdout.count("1 WRONG") == 1
    assert done.stdout.count("all right") == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--driver", "pigeon"), "no driver 'pigeon' is installed; installed: flipping, loopback"),
        (("--driver", "writing"), "driver 'writing' can write with memory of kind cpu"),
        (("--prefill", "9/HND/16"), "9 ranks: the model has 8 heads"),
        (("--prefill", "HND/16"), "write RANKS/ORDER/TOKENS, such as 2/HND/16"),
        (("--decode", "DNH/16"), "order 'DNH': choose HND or NHD"),
        (("--decode", "NHD/0"), "0 tokens a page"),
        (("--megabytes", "100000000"), "choose --megabytes below"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    environment: dict[str, str], arguments: tuple[str, ...], words: str
) -> None:
    done = demo(environment, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@contextmanager
def stuck_demo(environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A demo in the middle of pulling, and descriptors that tell when its processes end."""
    with subprocess.Popen(
        command("--megabytes", "4", "--driver", "stuck"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=environment["TMPDIR"],
    ) as process:
        watches: list[int] = []
        try:
            pids = pids_in(read_until(process.stdout, "prefill engine computed"))
            watches = [os.pidfd_open(pid) for pid in pids]
            yield process, watches
        finally:
            process.kill()
            for watch in watches:
                os.close(watch)


def read_until(stream: IO[str] | None, words: str) -> str:
    assert stream is not None
    lines: list[str] = []
    for line in stream:
        lines.append(line)
        if words in line:
            return "".join(lines)
    raise AssertionError(f"{words!r} was never printed: {''.join(lines)}")


def all_end(watches: list[int]) -> bool:
    return all(select.select([watch], [], [], SECONDS)[0] for watch in watches)


def test_ctrl_c_leaves_nothing_behind(environment: dict[str, str]) -> None:
    with stuck_demo(environment) as (process, watches):
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=SECONDS)
        assert all_end(watches)
    assert (process.returncode, errors) == (130, "")
    assert "Interrupted" in output
    assert not list(Path(environment["TMPDIR"]).iterdir())


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_demo_that_is_killed_takes_its_processes_along(
    environment: dict[str, str], signum: signal.Signals
) -> None:
    with stuck_demo(environment) as (process, watches):
        process.send_signal(signum)
        assert all_end(watches)
        process.communicate(timeout=SECONDS)
    assert not list(Path(environment["TMPDIR"]).iterdir())


# The check itself, without which nothing above means anything.


def test_no_two_words_of_any_tensors_are_equal() -> None:
    first, second, *_ = requests_of(1 << 20)
    tensors = [
        values(request, layer, index, range(HEADS))
        for request in (first, second)
        for layer in range(LAYERS)
        for index in range(2)
    ]
    words = np.concatenate([tensor.ravel() for tensor in tensors])
    assert len(np.unique(words)) == len(words)


@settings(max_examples=25)
@given(data=st.data(), order=st.sampled_from(["HND", "NHD"]))
def test_any_wrong_byte_is_found(data: st.DataObject, order: str) -> None:
    shape = Shape(tp=1, order=order, block=4)
    requests = requests_of(1 << 20)
    cache = make_cache(shape, 0, requests, POISON)
    pages = scattered_pages(shape, requests, seed=data.draw(st.integers(0, 99)))
    for request, ids in zip(requests, pages, strict=True):
        compute(shape, 0, cache, request, ids)

    def wrong() -> int:
        used = [page for ids in pages for page in ids]
        found = (
            wrong_bytes(shape, 0, cache, r, ids) for r, ids in zip(requests, pages, strict=True)
        )
        return sum(found) + wrong_spare_bytes(cache, used)

    assert wrong() == 0
    cache.reshape(-1).view(np.uint8)[data.draw(st.integers(0, cache.nbytes - 1))] ^= 0x10
    assert wrong() == 1


@given(st.integers(1, 10**9))
def test_requests_have_the_bytes_that_were_asked_for(nbytes: int) -> None:
    requests = requests_of(nbytes)
    tokens = sum(request.tokens for request in requests)
    assert nbytes <= tokens * (128 << 10) < nbytes + (128 << 10) + 8 * (128 << 10)
    assert all(request.tokens > 0 for request in requests)


@pytest.mark.parametrize(
    "text", ["", "2", "2/HND", "2/HND/16/1", "x/HND/16", "2/HND/-1", "²/HND/1"]
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(DemoError):
        shape_of(text)


def test_neither_torch_nor_vllm_is_needed() -> None:
    program = (
        "import sys, kvferry.cli.demo.prefill\n"
        "print([name for name in ('torch', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=SECONDS
    )
    assert done.stdout.strip() == "[]"
