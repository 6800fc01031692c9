"""UCX over TCP between two hosts: the conformance suite, and a link that is cut and restored.

Run all of it, which takes minutes, with  make long-networks

``not slow`` leaves only the parts of the suite in which another host may differ from another
process of the same host: how the death of a peer is noticed, and that notifications follow bytes.
Transfers between hosts are also covered by the tests that cut the link, and the rest of the suite
runs over TCP on one host (``test_contract.py``).
"""

from __future__ import annotations

from kvferry.testing import NotificationTests, ProcessTests, TransportContract
from tests.drivers.network_namespaces import DEVICE
from tests.drivers.two_hosts import CutLinkTests, PeersOnOtherHost

# Both hosts share one kernel: UCX would take their loopback devices for the same one, and likewise
# their memory.
ACROSS_LINK = {"transports": ["tcp"], "devices": [DEVICE]}
# A busy machine may answer later than a deployment would wait.
LONG_TIMEOUT = ACROSS_LINK | {"connect_seconds": 60.0}


class TestTwoHosts(PeersOnOtherHost, NotificationTests, ProcessTests):
    factory = "kvferry.drivers.ucx:UcxTransport"
    options = LONG_TIMEOUT
    lasting_bytes = 32 << 30


class TestTwoHostsWholeSuite(PeersOnOtherHost, TransportContract):
    factory = "kvferry.drivers.ucx:UcxTransport"
    options = LONG_TIMEOUT
    lasting_bytes = 32 << 30


class TestCutLink(CutLinkTests):
    factory = "kvferry.drivers.ucx:UcxTransport"
    options = ACROSS_LINK | {"deadline_seconds": 2.0, "connect_seconds": 15.0}
    lasting_bytes = 32 << 30
    noticed_within = 15.0
