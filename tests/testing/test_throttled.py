"""ThrottledTransport: an engine's driver by name, with options, that keeps reads to a rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvferry.core.errors import DriverError
from kvferry.core.transport import State
from kvferry.core.transport.copies import copies_between
from kvferry.core.transport.registry import create
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.testing.memory import allocate, pattern
from tests.cli.command import install_drivers

NBYTES = 4096
CODE = "from kvferry.testing.throttled import ThrottledTransport\n"


@pytest.fixture
def _throttled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the driver ``throttled``."""
    install_drivers(tmp_path, CODE, throttled="ThrottledTransport")
    monkeypatch.syspath_prepend(str(tmp_path))


@contextmanager
def reading(**options: object) -> Iterator[Callable[[], State]]:
    """Read from loopback with the driver; yield what returns the read's state.

    It is first returned when all bytes have arrived.
    """
    reader = create("throttled", {"driver_options": {"threads": 1}, **options})
    source = LoopbackTransport()
    target, content = allocate("cpu", NBYTES), allocate("cpu", NBYTES)
    content.put(pattern(NBYTES, 1))
    reader.register(target.region)
    source.register(content.region)
    pairs = [(target.region.address, content.region.address, NBYTES)]
    copies = copies_between(pairs, local=target.region, remote=content.region)
    transfer = reader.read(reader.connect(source.address()), copies)
    while not (target.get() == content.get()).all():
        reader.poll([transfer])
    yield lambda: reader.poll([transfer])[0].state
    reader.close()
    source.close()


@pytest.mark.usefixtures("_throttled")
def test_driver_by_name_keeps_to_its_rate() -> None:
    with reading(bytes_per_second=1e-3) as state:
        assert {state() for _ in range(20)} == {State.PENDING}


@pytest.mark.usefixtures("_throttled")
def test_without_a_rate_it_is_the_other_driver() -> None:
    with reading(driver="loopback") as state:
        while state() is State.PENDING:
            pass
        assert state() is State.DONE


@pytest.mark.usefixtures("_throttled")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bytes_per_second": 0}, "bytes_per_second=0: give more than 0"),
        ({"bytes_per_second": -5.0}, "bytes_per_second=-5.0"),
        ({"driver": "pigeon"}, "no driver 'pigeon' is installed"),
        ({"driver_options": {"speed": 9}}, "speed"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(DriverError, match=said):
        create("throttled", options)
