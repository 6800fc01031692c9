"""Drivers with one fault each: loopback, with a mistake that an author of a driver might make.

The docstring of each class states its fault; ``CAUGHT_BY`` names the test of the conformance suite
that has to find the fault. The modules are named as those of ``kvferry.testing.contract``.
"""

from tests.long.drivers.planted import (
    closing,
    concurrent_connect,
    in_flight,
    notifications,
    outcomes,
    paged_reads,
    peers,
    processes,
    quiescence,
    refusals,
    state_machine,
    stopped_peers,
    transfers,
)
from tests.long.drivers.planted.base import CAUGHT_BY, FACTORIES

TOPICS = (
    closing,
    concurrent_connect,
    in_flight,
    notifications,
    outcomes,
    paged_reads,
    peers,
    processes,
    quiescence,
    refusals,
    state_machine,
    stopped_peers,
    transfers,
)

__all__ = ["CAUGHT_BY", "FACTORIES", "TOPICS"]
