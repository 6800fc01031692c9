"""Drivers with one fault each: loopback, and what somebody might well get wrong.

The docstring of each is the fault; ``CAUGHT_BY`` says which test of the suite has to find it.
"""

from tests.testing.planted import (
    ending,
    flight,
    landing,
    memory,
    moving,
    notes,
    outcomes,
    peers,
    processes,
    rare,
    stopped,
)
from tests.testing.planted.base import CAUGHT_BY, FACTORIES

TOPICS = (
    ending,
    flight,
    landing,
    memory,
    moving,
    notes,
    outcomes,
    peers,
    processes,
    rare,
    stopped,
)

__all__ = ["CAUGHT_BY", "FACTORIES", "TOPICS"]
