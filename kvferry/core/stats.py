"""What an endpoint did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord:
    """One load from begin to report.

    Attributes:
        request: the consumer's id of it.
        engine: the producer.
        error: why it failed, or ``None``.
        reads: whether there was anything to pull; if not, the producer was only told.
        tokens: how many were pulled, in the group with the most.
        copies, nbytes: what this rank read.
        seconds: from begin to report.
        handshake_seconds: of these, until the producer was known and connected.
        read_seconds: of the longest read.
        fence_seconds: of the longest fence.
    """

    request: str
    engine: str
    error: str | None
    reads: bool
    tokens: int
    copies: int
    nbytes: int
    seconds: float
    handshake_seconds: float
    read_seconds: float
    fence_seconds: float
