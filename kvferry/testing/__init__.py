"""Tools for tests: the conformance suite for drivers, a transport with faults, and small engines.

Install ``kvferry[testing]``, and put this into a test module of your distribution::

    from kvferry.testing import TransportContract

    class TestMine(TransportContract):
        factory = "mine.transport:MyTransport"    # importable: other processes import it, too
        options = {"port": 0}                     # what the constructor takes, if anything

Then run ``pytest``. Each rule of ``kvferry.core.transport`` is a test whose name states the rule.
The tests use transports of this process and of processes that the suite starts, kills and stops.
If your ``capabilities`` deny something, its tests check that the transport refuses it. The suite
fills and inspects memory itself, without your transport; ``memory = "cuda"`` tests device memory,
and ``memory = "package.module:function"`` any memory that you can allocate
(``kvferry.testing.memory``).

``ContractSettings`` has the other settings, above all ``lasting_bytes``: how much a transfer has to
move to take some seconds. While you write a driver, inherit single topics instead
(``TransferTests``, ``RefusalTests``, ...: the bases of ``TransportContract``). ``-m "not slow"``
leaves out the transfer of 1 GiB. If the driver cannot run on a machine, say why with
``pytest.skip`` in your module. Give tests a time limit (pytest-timeout), so that a hang is reported
by the test's name.

``FaultyTransport`` wraps any driver and injects faults into its transfers. ``ModelFreeEngine`` is
an engine without a model, for tests of whole hand-overs: over your driver, with another engine's
connector, or through a router (``kvferry.testing.engines`` has an example). It needs neither pytest
nor the extra ``testing``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.testing.contract import (
        ClosingTests,
        ConcurrentConnectTests,
        ContractSettings,
        InFlightTests,
        NotificationTests,
        PeerTests,
        ProcessTests,
        QuiescenceTests,
        RefusalTests,
        StateMachineTests,
        StoppedPeerTests,
        ThreadTests,
        TransferTests,
        TransportContract,
    )
    from kvferry.testing.engines import CacheShape, EngineRank, ModelFreeEngine
    from kvferry.testing.faulty import Fault, FaultyTransport, Schedule
    from kvferry.testing.memory import Buffer

__all__ = [
    "Buffer",
    "CacheShape",
    "ClosingTests",
    "ConcurrentConnectTests",
    "ContractSettings",
    "EngineRank",
    "Fault",
    "FaultyTransport",
    "InFlightTests",
    "ModelFreeEngine",
    "NotificationTests",
    "PeerTests",
    "ProcessTests",
    "QuiescenceTests",
    "RefusalTests",
    "Schedule",
    "StateMachineTests",
    "StoppedPeerTests",
    "ThreadTests",
    "TransferTests",
    "TransportContract",
]


# Imported when used: the pytest plugin and the peers' processes import this package and need
# neither pytest nor Hypothesis.
def __getattr__(name: str) -> object:
    for module in ("memory", "faulty", "engines", "contract") if name in __all__ else ():
        found = importlib.import_module(f"{__name__}.{module}")
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
