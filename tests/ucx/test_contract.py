"""The conformance suite on UCX, over shared memory; ``tests/long/ucx`` has it over TCP."""

from __future__ import annotations

from kvferry.testing import TransportContract

# A busy machine may answer later than a deployment would wait: at a load of 30 on two cores, the
# kernel has been seen to stand still for 40 s.
LONG_TIMEOUT = {"connect_seconds": 60.0}


class TestSharedMemory(TransportContract):
    factory = "kvferry.drivers.ucx:UcxTransport"
    options = LONG_TIMEOUT
    lasting_bytes = 64 << 30
