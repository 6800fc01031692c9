"""A driver that reads no faster than so many bytes per second, for tests of whole engines.

Engines find a driver by its entry point, and this one has none: a test or a benchmark installs one
that leads here. Both engines of a pair have to name that driver; only the options of the engine
that reads matter.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.core.errors import DriverError
from kvferry.core.transport import EnterThread, enter_nothing
from kvferry.core.transport.registry import create
from kvferry.testing.faulty import FaultyTransport


class ThrottledTransport(FaultyTransport):
    """Another driver's transport, whose reads together keep to ``bytes_per_second``.

    Raises:
        DriverError: The other driver does not start, or the rate is not above 0.
    """

    def __init__(
        self,
        *,
        driver: str = "loopback",
        driver_options: Mapping[str, object] | None = None,
        bytes_per_second: float | None = None,
        enter: EnterThread = enter_nothing,
    ) -> None:
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise DriverError(
                f"bytes_per_second={bytes_per_second}: give more than 0, or leave it out for no "
                "limit"
            )
        super().__init__(
            create(driver, driver_options, enter=enter), bytes_per_second=bytes_per_second
        )
