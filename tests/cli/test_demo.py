"""``kvferry demo`` as a user runs it, with real processes that the tests watch."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from ctypes import memmove
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli import demo
from kvferry.cli.demo import DemoError, requests_of, shape_of
from kvferry.core.transport import PeerId, TransferId, Transport
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from tests.cli.command import Command, CommandResult


class Flipping(LoopbackTransport):
    """Changes the first byte of the first larger transfer."""

    flipped = False

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        if copies.total > 8 and not self.flipped:
            self.flipped = True
            while not super().poll([transfer])[0].state.final:
                pass
            memmove(int(copies.local[0]), b"\xa5", 1)
        return transfer


@pytest.fixture
def run(command: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CommandResult]:
    """A function that runs a small demo, and checks that it leaves no process behind."""

    def run_demo(*arguments: str, made: Callable[[], Transport] | None = None) -> CommandResult:
        if made is not None:
            monkeypatch.setattr(demo, "create", lambda name: made())
        ran = command.run("demo", "--megabytes", "4", *arguments)
        own = str(os.getpid())
        assert not [pid for pid in pids_in(ran.out) if pid != own and Path(f"/proc/{pid}").exists()]
        return ran

    return run_demo


def pids_in(output: str) -> list[str]:
    return re.findall(r"^  (?:prefill|decode), process (\d+):", output, re.M)


def test_demo_moves_every_byte_and_prints_speed(run: Callable[..., CommandResult]) -> None:
    done = run()
    assert (done.status, done.err) == (0, "")
    first, second = done.out.split("Engines of unlike pages")
    assert "Engines of like pages" in first
    assert "1 rank, NHD, pages of 32 tokens" in second
    for output, piece in ((first, "16,384"), (second, "256")):
        assert len(set(pids_in(output))) == 2
        assert "All bytes are right." in output
        assert f"pieces of {piece} bytes" in output
        for name in ("kvferry", "gather", "memcpy"):
            assert re.search(rf"{name} +\d+\.\d\d GB/s", output)


def test_wrong_byte_between_other_shapes_is_reported_and_fails_the_command(
    run: Callable[..., CommandResult],
) -> None:
    done = run("--prefill", "3/nhd/24", "--decode", "hnd/16", made=Flipping)
    assert done.status == 1
    assert re.findall(r"^(\S+): (\d+) bytes are WRONG", done.out, re.M) == [("demo-0", "1")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--driver", "pigeon"), "no driver 'pigeon' is installed; installed: loopback"),
        (("--prefill", "9/HND/16"), "write RANKS (1 to 8)/ORDER (HND or NHD)/TOKENS (1 to 1024)"),
        (("--megabytes", "99999"), "choose --megabytes below"),
    ],
)
def test_invalid_arguments_are_reported_on_one_line(
    run: Callable[..., CommandResult], arguments: tuple[str, ...], words: str
) -> None:
    done = run(*arguments)
    assert (done.status, done.out, done.err.count("\n")) == (1, "", 1)
    assert words in done.err


@given(st.integers(1, 10**9))
def test_requests_have_the_requested_bytes(nbytes: int) -> None:
    requests = requests_of(nbytes)
    tokens = sum(request.tokens for request in requests)
    assert nbytes <= tokens * (128 << 10) < nbytes + 9 * (128 << 10)
    for one, following in itertools.pairwise(requests):
        assert one.first_token + one.tokens == following.first_token, "no token is in two requests"


@pytest.mark.parametrize(
    "text", ["", "HND/16", "2/HND/16/1", "x/HND/16", "2/HND/-1", "²/HND/1", "1/DNH/16", "1/NHD/0"]
)
def test_malformed_shape_is_refused(text: str) -> None:
    with pytest.raises(DemoError, match=r"write RANKS .*, such as 2/HND/16"):
        shape_of(text)
