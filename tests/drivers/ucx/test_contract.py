"""The conformance suite on UCX: over this host's shared memory, and over tcp."""

from __future__ import annotations

import pytest

from kvferry.testing import TransportContract

pytestmark = pytest.mark.ucx

# On a machine with much else to do, an answer may take longer than one would wait for it in use:
# at a load of 30 on two cores, the kernel itself has been seen to stand still for 40 s.
PATIENT = {"connect_seconds": 60.0}


class TestSharedMemory(TransportContract):
    factory = "kvferry.drivers.ucx:UcxTransport"
    options = PATIENT
    lasting_bytes = 64 << 30


class TestTcp(TransportContract):
    factory = "kvferry.drivers.ucx:UcxTransport"
    options = PATIENT | {"transports": ["tcp"]}
    lasting_bytes = 32 << 30
