"""The conformance suite on NIXL over UCX; ``tests/long/nixl`` has its other modes."""

from __future__ import annotations

from kvferry.testing import ClosingTests, ContractSettings, TransportContract

FACTORY = "kvferry.drivers.nixl:NixlTransport"


class TestNixl(TransportContract):
    factory = FACTORY
    # By default there are four threads. Each takes a UCX worker, which costs as much as the agent.
    options = {"backend_options": {"num_threads": 2}}  # noqa: RUF012 - as the base class has it
    # NIXL cannot cancel a transfer, so the suite waits for the end of every long one; there are
    # longer ones in ``tests/long/nixl``.
    lasting_bytes = 256 << 20

    # See the classes below, and in ``tests/long/nixl``.
    test_close_gives_threads_and_descriptors_back = None  # type: ignore[assignment]


class TestNixlWithoutThreads(ContractSettings):
    """Without worker threads of UCX, close releases every thread and descriptor."""

    factory = FACTORY
    options = {"backend_options": {"num_threads": 0}}  # noqa: RUF012 - as the base class has it

    test_close_gives_threads_and_descriptors_back = (
        ClosingTests.test_close_gives_threads_and_descriptors_back
    )
