"""The conformance suite on Mooncake over tcp."""

from __future__ import annotations

import pytest
from kvferry_mooncake import MooncakeTransport

from kvferry.core.errors import DriverError
from kvferry.testing import TransportContract

try:
    MooncakeTransport().close()
except DriverError as exc:
    pytest.skip(str(exc), allow_module_level=True)


class TestMooncake(TransportContract):
    factory = "kvferry_mooncake:MooncakeTransport"
    # It sends a request for every copy, and 100,000 of them take a while.
    patience = 60.0
