"""The conformance suite on NIXL over UCX."""

from __future__ import annotations

import pytest

from kvferry.testing import TransportContract

pytestmark = pytest.mark.nixl


class TestNixl(TransportContract):
    factory = "kvferry.drivers.nixl:NixlTransport"
    # A transfer cannot be cancelled, so the suite waits for the ends of those that last.
    lasting_bytes = 4 << 30
