"""UCX over TCP between two hosts: the conformance suite, and a link that is cut and comes back.

All of it, which takes minutes:  pytest -m ucx tests/drivers/ucx/test_namespaces.py

With ``not slow``, of the suite only what another host may do otherwise than another process of this
one: how its death is noticed, and how notifications follow bytes. What else there is to show about
bytes between hosts is in the tests that cut the link; the rest has been shown over tcp on one host
(``test_contract.py``), by the same code.
"""

from __future__ import annotations

import pytest

from kvferry.testing import NotificationTests, ProcessTests, TransportContract
from tests.drivers.between_networks import CutLinkTests, FarAway
from tests.drivers.networks import DEVICE

pytestmark = pytest.mark.ucx

# One kernel serves both hosts: UCX would take their loopback devices for one and the same, and
# their memory, too.
OVER_THE_CABLE = {"transports": ["tcp"], "devices": [DEVICE]}
# On a machine with much else to do, an answer may take longer than one would wait for it.
PATIENT = OVER_THE_CABLE | {"connect_seconds": 60.0}


class TestBetweenHosts(FarAway, NotificationTests, ProcessTests):
    factory = "kvferry.drivers.ucx:UcxTransport"
    options = PATIENT
    lasting_bytes = 32 << 30


@pytest.mark.slow
class TestAllBetweenHosts(FarAway, TransportContract):
    factory = "kvferry.drivers.ucx:UcxTransport"
    options = PATIENT
    lasting_bytes = 32 << 30


class TestCutLinks(CutLinkTests):
    factory = "kvferry.drivers.ucx:UcxTransport"
    options = OVER_THE_CABLE | {"deadline_seconds": 2.0, "connect_seconds": 15.0}
    lasting_bytes = 32 << 30
    noticed_within = 15.0
