"""All exceptions that kvferry raises."""

from __future__ import annotations

import enum


class KVFerryError(Exception):
    """Base class of all exceptions that kvferry raises."""


class LayoutError(KVFerryError, ValueError):
    """A layout describes memory outside its regions, or the same memory twice."""


class PlanError(KVFerryError):
    """The layouts of two engines do not match; names the field, the range and the ranks."""


class PageError(KVFerryError, ValueError):
    """A page list does not fit: an invalid id, a missing page, or too few pages."""


class WireError(KVFerryError, ValueError):
    """Bytes from a peer are not a valid message of this protocol."""


class HandshakeError(KVFerryError):
    """A peer could not be reached, or its answer is not valid."""


class RefusedError(HandshakeError):
    """A side channel answered with a refusal, for instance because it belongs to another engine."""


class AdmissionError(HandshakeError):
    """One of two engines does not admit the key or address of the other; names the setting."""


class IncompatibleError(HandshakeError):
    """Two engines must not exchange pages; names every difference with both values."""


class TicketReason(enum.StrEnum):
    """Why a ticket is refused."""

    MALFORMED = "malformed"
    """A part of it is missing, of the wrong type, or out of bounds."""
    FOREIGN = "foreign"
    """Another connector made it."""
    VERSION = "version"
    SIGNATURE = "signature"
    """Its signature is missing or wrong: it was altered, forged, or signed with other secrets."""
    PROOF = "proof"
    """It does not prove that its engine made it: altered, forged, or the proof removed."""
    ROLE = "role"
    """The role of this engine does not allow it to load."""
    OWN = "own"
    """This engine made it."""
    PROMPT = "prompt"
    """It was made for another prompt."""
    TOKENS = "tokens"
    """Its states and windows belong to another number of tokens."""
    ADMISSION = "admission"
    """This engine does not admit the key of the engine that made it."""
    RESTARTED = "restarted"
    """The engine that made it has been restarted since."""
    MISMATCH = "mismatch"
    """It contradicts the handshake about the shape of its engine."""


class TicketError(KVFerryError, ValueError):
    """A ticket is refused before anything is read.

    Attributes:
        reason: why, as a label for metrics.
    """

    def __init__(self, text: str = "", *, reason: TicketReason = TicketReason.MALFORMED) -> None:
        super().__init__(text)
        self.reason = reason


class SecretError(KVFerryError, ValueError):
    """A key, a secret or an access list is missing or invalid; never shows a secret."""


class StaleError(KVFerryError):
    """The hold ended before the read did, so the bytes that were read must not be used."""


class DeadlineError(KVFerryError):
    """A load did not end in time; names the stage that it was in."""


class EndpointClosedError(KVFerryError):
    """The endpoint has been closed."""


class DriverError(KVFerryError):
    """A driver cannot be found, loaded or used; says what to do."""


class TransportError(KVFerryError):
    """Base class of errors that a driver raises, or reports for a failed transfer."""


class TransportUsageError(TransportError, ValueError):
    """A mistake of the caller: an unknown id, an unregistered range, a closed transport."""


class TransportUnsupportedError(TransportError):
    """The driver cannot do this, as its capabilities declare."""


class ConnectError(TransportError):
    """No connection to the peer's address can be made; says why and what to change."""


class PeerLostError(TransportError):
    """The peer died, restarted or was disconnected."""


class StatusUnknownError(TransportError):
    """The driver cannot tell the status of a transfer; only ``disconnect`` proves it quiet."""


class TransferCancelledError(TransportError):
    """The transfer ended because its caller cancelled it."""
