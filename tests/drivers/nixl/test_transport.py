"""What is NIXL's own: options, telemetry, what it prints, and how its process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvferry.core import registry
from kvferry.core.copies import copies_between
from kvferry.core.errors import DriverError, TransportUsageError
from kvferry.core.memory import region_of
from kvferry.core.transport import Quiescence, State, TransferId
from kvferry.drivers.nixl import NixlTransport

pytestmark = pytest.mark.nixl

Make = Callable[..., NixlTransport]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[NixlTransport] = []

    def transport(**options: object) -> NixlTransport:
        made.append(NixlTransport(**options))
        return made[-1]

    yield transport
    for one in made:
        one.close()


def test_the_registry_finds_it() -> None:
    [info] = [one for one in registry.installed() if one.name == "nixl"]
    report = registry.describe(info)
    assert report.reason is None
    assert report.capabilities is not None
    assert "cpu" in report.capabilities.memory
    assert report.capabilities.quiescence is Quiescence.AFTER_DISCONNECT


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "XYZ"}, r"no backend 'XYZ'; nixl\w* [\d.]+ offers .*UCX"),
        ({"backend": "POSIX"}, "backend POSIX of .* reaches no other process"),
        ({"backend_options": {"threads": 2}}, "no parameter 'threads'; it has .*num_threads"),
        ({"backend_options": {"num_threads": [2]}}, r"backend_options"),
        (
            {"backend_options": {"ucx_error_handling_mode": "perhaps"}},
            "backend UCX of .* does not start with",
        ),
        ({"threads": 2}, "unknown field `threads`; it has, with their defaults: backend"),
    ],
)
def test_options_that_it_does_not_have_are_refused_with_those_that_it_has(
    options: dict[str, object], said: str
) -> None:
    with pytest.raises(DriverError, match=said):
        registry.create("nixl", options)


@pytest.mark.parametrize("threads", [0, "1"])
def test_a_backend_takes_its_parameters(make: Make, threads: object) -> None:
    _moved(make(backend_options={"num_threads": threads, "num_workers": 2}), make())


def test_telemetry_of_what_is_done(make: Make) -> None:
    transport = make(telemetry=True)
    transfer = _moved(transport, make())
    [found] = transport.telemetry(transfer)
    assert found.nbytes == 1 << 16
    assert found.descriptors >= 1
    assert 0 <= found.post_seconds <= found.seconds
    transport.forget(transfer)
    with pytest.raises(TransportUsageError, match="never started, or forgotten"):
        transport.telemetry(transfer)


def test_no_telemetry_unless_asked(make: Make) -> None:
    transport = make()
    with pytest.raises(TransportUsageError, match="set driver_options: telemetry"):
        transport.telemetry(_moved(transport, make()))


CODE = """
import logging
import numpy as np
from kvferry.core.memory import region_of
from kvferry.drivers.nixl import NixlTransport

logging.basicConfig(level=logging.DEBUG)
one, other = NixlTransport(), NixlTransport()
buffer = np.zeros(4096, np.uint8)
one.register(region_of(buffer))
peer = other.connect(one.address())
other.notify(peer, b"x")
if {closed}:
    one.close()
    other.close()
print("the end", logging.raiseExceptions)
"""


def _run(*, closed: bool, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE.replace("{closed}", str(closed))],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment,
    )


@pytest.mark.parametrize("closed", [True, False])
def test_it_prints_nothing_and_its_process_ends_well(closed: bool) -> None:
    """Although NIXL brings libraries that many machines have, too, in another version."""
    run = _run(closed=closed)
    assert run.stdout == "the end True\n"
    assert "INFO" not in run.stderr
    assert run.returncode == 0, run.stderr


def test_it_says_more_when_asked() -> None:
    run = _run(closed=True, NIXL_LOG_LEVEL="INFO")
    assert "Initialized NIXL agent" in run.stdout + run.stderr


def _moved(transport: NixlTransport, other: NixlTransport) -> TransferId:
    """A transfer of 64 KiB that is done."""
    mine, theirs = np.zeros(1 << 16, np.uint8), np.full(1 << 16, 7, np.uint8)
    local, remote = region_of(mine), region_of(theirs)
    transport.register(local)
    other.register(remote)
    peer = transport.connect(other.address())
    copies = copies_between([(local.address, remote.address, 1 << 16)], local=local, remote=remote)
    transfer = transport.read(peer, copies)
    while not (status := transport.poll([transfer])[0]).state.final:
        pass
    assert status.state is State.DONE
    assert (mine == 7).all()
    transport.deregister(local)
    return transfer
