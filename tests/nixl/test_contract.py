"""The conformance suite on NIXL over UCX; ``tests/long/nixl`` has its other modes."""

from __future__ import annotations

import pytest

from kvferry.testing import ClosingTests, TransportContract
from kvferry.testing.contract.workbench import Workbench

FACTORY = "kvferry.drivers.nixl:NixlTransport"


class TestNixl(TransportContract):
    factory = FACTORY
    # NIXL cannot cancel a transfer, so the suite waits for the end of every long one; there are
    # longer ones in ``tests/long/nixl``.
    lasting_bytes = 256 << 20

    @pytest.mark.xfail(
        strict=True,
        reason="each thread that UCX has beside its progress thread keeps a socket of a peer that "
        "is gone, until a large transfer wakes it or the transport is closed",
    )
    def test_close_gives_threads_and_descriptors_back(self, lab: Workbench) -> None:
        super().test_close_gives_threads_and_descriptors_back(lab)


class TestNixlWithoutThreads(ClosingTests):
    """Without worker threads of UCX, close releases every thread and descriptor."""

    factory = FACTORY
    options = {"backend_options": {"num_threads": 0}}  # noqa: RUF012 - as the base class has it
    lasting_bytes = 256 << 20
