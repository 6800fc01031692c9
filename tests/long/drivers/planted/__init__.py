"""Drivers with one fault each: loopback, with a mistake that an author of a driver might make.

``CAUGHT_BY`` names for each fault the test of the conformance suite that has to find it.
"""

from importlib import import_module
from pkgutil import iter_modules

from kvferry.core.transport import Transport
from tests.long.drivers.planted.base import CAUGHT_BY, DRIVERS

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["CAUGHT_BY"]


def __getattr__(name: str) -> type[Transport]:
    """Return a driver, for the suite's setting ``factory``."""
    try:
        return DRIVERS[name]
    except KeyError as exc:
        raise AttributeError(name) from exc
