"""ThrottledTransport: an engine's driver by name, with options, that keeps reads to a rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvferry.core.errors import DriverError
from kvferry.core.transport import State
from kvferry.core.transport.registry import create
from kvferry.drivers.loopback import LoopbackTransport
from tests.cli.command import install_drivers
from tests.drivers.pairs import paired, until

CODE = "from kvferry.testing.throttled import ThrottledTransport\n"


@pytest.fixture(autouse=True)
def _throttled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the driver ``throttled``."""
    install_drivers(tmp_path, CODE, throttled="ThrottledTransport")
    monkeypatch.syspath_prepend(str(tmp_path))


@contextmanager
def reading(**options: object) -> Iterator[Callable[[], State]]:
    """Read with the driver; when all bytes have arrived, yield what returns the read's state."""
    made = create("throttled", {"driver_options": {"threads": 1}, **options})
    with closing(made) as reader, closing(LoopbackTransport()) as source:
        pair = paired(reader, source, 4096)
        transfer = pair.read()
        assert until(lambda: (pair.mine == pair.theirs).all())
        yield lambda: pair.status(transfer).state


def test_driver_by_name_keeps_to_its_rate() -> None:
    with reading(bytes_per_second=1e-3) as state:
        assert {state() for _ in range(20)} == {State.PENDING}


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
