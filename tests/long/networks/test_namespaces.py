"""UCX over TCP between two hosts: the conformance suite, and a link that is cut and restored."""

from __future__ import annotations

from kvferry.testing import TransportContract
from tests.drivers.network_namespaces import DEVICE
from tests.drivers.two_hosts import CutLinkTests, PeersOnOtherHost

# Both hosts share one kernel: UCX would take their loopback devices for the same one, and likewise
# their memory.
ACROSS_LINK = {"transports": ["tcp"], "devices": [DEVICE]}
# A busy machine may answer later than a deployment would wait.
LONG_TIMEOUT = ACROSS_LINK | {"connect_seconds": 60.0}


class TestTwoHosts(PeersOnOtherHost, TransportContract):
    factory = "kvferry.drivers.ucx:UcxTransport"
    options = LONG_TIMEOUT
    lasting_bytes = 32 << 30


class TestCutLink(CutLinkTests):
    factory = "kvferry.drivers.ucx:UcxTransport"
    options = ACROSS_LINK | {"deadline_seconds": 2.0, "connect_seconds": 15.0}
    lasting_bytes = 32 << 30
    noticed_within = 15.0
