"""UCX over TCP between two hosts: the conformance suite, and a link that is cut and comes back."""

from __future__ import annotations

import pytest

from kvferry.testing import TransportContract
from tests.drivers.between_networks import CutLinkTests, FarAway
from tests.drivers.networks import DEVICE

pytestmark = pytest.mark.ucx

# One kernel serves both hosts: UCX would take their loopback devices for one and the same, and
# their memory, too.
OVER_THE_CABLE = {"transports": ["tcp"], "devices": [DEVICE]}


class TestBetweenHosts(FarAway, TransportContract):
    factory = "kvferry.drivers.ucx:UcxTransport"
    # On a machine with much else to do, an answer may take longer than one would wait for it.
    options = OVER_THE_CABLE | {"connect_seconds": 15.0}
    lasting_bytes = 32 << 30


class TestCutLinks(CutLinkTests):
    factory = "kvferry.drivers.ucx:UcxTransport"
    options = OVER_THE_CABLE | {"deadline_seconds": 2.0}
    lasting_bytes = 32 << 30
    noticed_within = 5.0
