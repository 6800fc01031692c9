"""The conformance suite: a class per topic, and all of them together."""

from __future__ import annotations

from kvferry.testing.contract.settings import ContractSettings
from kvferry.testing.contract.transfers import TransferTests

__all__ = [
    "ContractSettings",
    "TransferTests",
    "TransportContract",
]


class TransportContract(
    TransferTests,
):
    """Every rule for a driver. Inherit it, say how to make a transport, and run pytest."""
