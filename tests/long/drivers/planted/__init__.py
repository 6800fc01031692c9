"""Drivers with one fault each: loopback, with a mistake that an author of a driver might make.

The docstring of each class, or of a function that stands for a method, states its fault;
``CAUGHT_BY`` names the test of the conformance suite that has to find the fault.
"""

from importlib import import_module
from pkgutil import iter_modules

from tests.long.drivers.planted.base import CAUGHT_BY, FACTORIES

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["CAUGHT_BY", "FACTORIES"]
