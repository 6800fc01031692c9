"""``kvferry demo`` as a user runs it, with real processes that the tests watch."""

from __future__ import annotations

import itertools
import os
import re
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cli.demo.decode import Decode
from kvferry.cli.demo.model import DemoError, requests_of, shape_of
from kvferry.drivers.loopback import LoopbackTransport
from tests.cli.command import COMMAND, install_drivers, run_kvferry

SECONDS = 110.0

DRIVERS_CODE = """
from ctypes import memmove
from dataclasses import replace

from kvferry.core.errors import TransferCancelledError
from kvferry.core.transport import State, Status
from kvferry.drivers.loopback import LoopbackTransport


class Flipping(LoopbackTransport):
    '''Changes the first byte of the first larger transfer.'''
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


class Elsewhere(LoopbackTransport):
    '''Does not reach CPU memory.'''

    @property
    def capabilities(self):
        return replace(super().capabilities, memory=frozenset({"cuda"}))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment with three more drivers and an empty folder for temporary files."""
    site, temporary = tmp_path / "site", tmp_path / "temporary"
    site.mkdir()
    temporary.mkdir()
    names = ("Flipping", "Stuck", "Elsewhere")
    drivers = install_drivers(site, DRIVERS_CODE, **{name.lower(): name for name in names})
    return drivers | {"TMPDIR": str(temporary)}


def demo(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a small demo and check that it leaves no process and no file behind."""
    folder = environment["TMPDIR"]
    done = run_kvferry(
        environment, "demo", "--megabytes", "4", *arguments, timeout=SECONDS, folder=folder
    )
    assert not [pid for pid in pids_in(done.stdout) if Path(f"/proc/{pid}").exists()]
    assert not list(Path(folder).iterdir())
    assert "Traceback" not in done.stderr
    return done


def pids_in(output: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"^ (?:prefill|decode) +\d of \d +(\d+)", output, re.M)]


# The command.


def test_demo_moves_every_byte_and_prints_speed(environment: dict[str, str]) -> None:
    done = demo(environment)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.split("Engines of unlike pages: HND with 16 tokens to NHD with 32")
    assert "Engines of like pages: HND with 16 tokens to HND with 16" in first
    for output in (first, second):
        assert len(set(pids_in(output))) == 3
        assert output.count("all right") == 8
        assert "untouched" in output
        assert "A used ticket tried again is refused" in output
        for name in ("kvferry", "gather", "memcpy"):
            assert re.search(rf"{name} +\d+\.\d\d GB/s", output)
    assert "pieces of 16,384 bytes" in first
    assert "here a rank's heads of a page" in first
    assert "pieces of 256 bytes" in second
    assert "HND and NHD have one head of one token in common, 256 bytes" in second


def test_demo_runs_with_other_shapes(environment: dict[str, str]) -> None:
    done = demo(environment, "--prefill", "3/nhd/24", "--decode", "hnd/16")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("all right") == 8


def test_wrong_byte_is_reported_and_fails_the_command(environment: dict[str, str]) -> None:
    done = demo(environment, "--driver", "flipping", "--prefill", "3/HND/16")
    assert done.returncode == 1
    assert done.stdout.count("1 WRONG") == 1
    assert done.stdout.count("all right") == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--driver", "pigeon"), "no driver 'pigeon' is installed; installed: elsewhere, flipping"),
        (("--driver", "elsewhere"), "driver 'elsewhere' reaches cuda memory; the demo reads cpu"),
        (("--prefill", "9/HND/16"), "9 ranks: the model has 8 heads"),
        (("--megabytes", "100000000"), "choose --megabytes below"),
    ],
)
def test_invalid_arguments_are_reported_on_one_line(
    environment: dict[str, str], arguments: tuple[str, ...], words: str
) -> None:
    done = demo(environment, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@contextmanager
def stuck_demo(environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Yield a demo that is loading, and the pidfds of its other processes."""
    with subprocess.Popen(
        [*COMMAND, "demo", "--megabytes", "4", "--driver", "stuck"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=environment["TMPDIR"],
    ) as process:
        pidfds: list[int] = []
        try:
            pids = pids_in(read_until(process.stdout, "prefill engine computed"))
            pidfds = [os.pidfd_open(pid) for pid in pids]
            yield process, pidfds
        finally:
            process.kill()
            for pidfd in pidfds:
                os.close(pidfd)


def read_until(stream: IO[str] | None, words: str) -> str:
    assert stream is not None
    lines: list[str] = []
    for line in stream:
        lines.append(line)
        if words in line:
            return "".join(lines)
    raise AssertionError(f"{words!r} was never printed: {''.join(lines)}")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ended_demo_leaves_no_process_and_no_file(
    environment: dict[str, str], signum: signal.Signals
) -> None:
    with stuck_demo(environment) as (process, pidfds):
        process.send_signal(signum)
        assert all(select.select([pidfd], [], [], SECONDS)[0] for pidfd in pidfds)
        output, errors = process.communicate(timeout=SECONDS)
    if signum == signal.SIGINT:
        assert (process.returncode, errors) == (130, "")
        assert "Interrupted" in output
    assert not list(Path(environment["TMPDIR"]).iterdir())


def test_interrupt_before_the_engines_start_is_said(tmp_path: Path) -> None:
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    environment = install_drivers(tmp_path, code, interrupting="Driver")
    done = run_kvferry(environment, "demo", "--driver", "interrupting")
    assert (done.returncode, done.stderr) == (130, "")
    assert done.stdout == "Interrupted: all processes have been ended.\n"


# How the demo checks bytes.


@settings(max_examples=5)
@given(data=st.data(), order=st.sampled_from(["HND", "NHD"]))
def test_every_wrong_byte_is_counted(data: st.DataObject, order: str) -> None:
    requests = requests_of(1 << 20)
    shape = shape_of(f"{order}/4", tp=1)
    decode = Decode(LoopbackTransport(), "loopback", shape, requests, lease=1.0)
    with decode.engine:
        [rank] = decode.engine.ranks
        for request, pages in decode.pages.items():
            rank.compute(pages, request.tokens, request.first_token)
        assert not any(decode.wrong_bytes(lambda: None).values())
        place = data.draw(st.integers(0, rank.cache.nbytes - 1))
        rank.cache.reshape(-1).view(np.uint8)[place] ^= 0x10
        assert sum(decode.wrong_bytes(lambda: None).values()) == 1


@given(st.integers(1, 10**9))
def test_requests_have_the_requested_bytes(nbytes: int) -> None:
    requests = requests_of(nbytes)
    tokens = sum(request.tokens for request in requests)
    assert nbytes <= tokens * (128 << 10) < nbytes + (128 << 10) + 8 * (128 << 10)
    assert all(request.tokens > 0 for request in requests)
    for one, following in itertools.pairwise(requests):
        assert one.prompt.stop == following.prompt.start, "no token is in two requests"


MALFORMED = ("", "2", "2/HND", "HND/16", "2/HND/16/1", "x/HND/16", "2/HND/-1", "²/HND/1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "write RANKS/ORDER/TOKENS, such as 2/HND/16") for text in MALFORMED),
        ("1/DNH/16", "order 'DNH': choose HND or NHD"),
        ("1/NHD/0", "0 tokens a page"),
    ],
)
def test_malformed_shape_is_refused(text: str, words: str) -> None:
    with pytest.raises(DemoError, match=words):
        shape_of(text)
