"""Every exception that kvferry raises on purpose, one sentence each."""

from __future__ import annotations

import enum


class KVFerryError(Exception):
    """Base of all of them: catch it to catch whatever kvferry refuses."""


class LayoutError(KVFerryError, ValueError):
    """A layout describes memory that it does not have, or describes it twice."""


class PlanError(KVFerryError):
    """Two engines' layouts cannot be matched; names the field, the range and the ranks."""


class PageError(KVFerryError, ValueError):
    """A page list does not fit: an id out of range, a hole that is needed, too few pages."""


class WireError(KVFerryError, ValueError):
    """Bytes from a peer are not a message of this protocol."""


class HandshakeError(KVFerryError):
    """A peer could not be reached, or its answer is none."""


class RefusedError(HandshakeError):
    """A side channel answered that it cannot serve us: it is another engine's, say."""


class AdmissionError(HandshakeError):
    """One of two engines does not admit the other: its key, its address; names the setting."""


class IncompatibleError(HandshakeError):
    """Two engines must not exchange pages; names what differs, with both values."""


class TicketReason(enum.StrEnum):
    """Why a ticket is refused."""

    MALFORMED = "malformed"
    """A part is missing, of the wrong type, or out of bounds."""
    FOREIGN = "foreign"
    """Another connector made it."""
    VERSION = "version"
    SIGNATURE = "signature"
    """It is not signed as it should be: altered, made up, or with other secrets."""
    PROOF = "proof"
    """It does not prove that its engine made it: altered, made up, or the proof taken away."""
    ROLE = "role"
    """This engine may not load."""
    OWN = "own"
    """This very engine made it."""
    PROMPT = "prompt"
    """It was made for another prompt."""
    TOKENS = "tokens"
    """Its states and windows are those after another number of tokens."""
    ADMISSION = "admission"
    """This engine would not ask the one that made it, by its key."""
    RESTARTED = "restarted"
    """Its engine was restarted since."""
    MISMATCH = "mismatch"
    """Its engine has another shape than it says."""


class TicketError(KVFerryError, ValueError):
    """A ticket is refused before anything is read.

    Attributes:
        reason: why, in a word for figures.
    """

    def __init__(self, text: str = "", *, reason: TicketReason = TicketReason.MALFORMED) -> None:
        super().__init__(text)
        self.reason = reason


class SecretError(KVFerryError, ValueError):
    """A key, a secret or a list of who may is missing or none; never shows a secret."""


class StaleError(KVFerryError):
    """The hold did not stand when the read ended, so what was read is not to be used."""


class DeadlineError(KVFerryError):
    """A load was not over in time; names the stage that it was in."""


class EndpointClosedError(KVFerryError):
    """The endpoint has been closed."""


class DriverError(KVFerryError):
    """A driver cannot be found, loaded or accepted; says what to do."""


class TransportError(KVFerryError):
    """Base of what a driver raises, or hands out as the error of a failed transfer."""


class TransportUsageError(TransportError, ValueError):
    """A caller's mistake: an unknown id, a range that was never registered, a closed transport."""


class TransportUnsupportedError(TransportError):
    """The driver declares that it cannot do this; its capabilities say so beforehand."""


class ConnectError(TransportError):
    """The peer's address cannot be connected to; says why and what to change."""


class PeerLostError(TransportError):
    """The peer died, restarted or was disconnected."""


class StatusUnknownError(TransportError):
    """The driver cannot say how a transfer stands; only ``disconnect`` proves it quiet then."""


class TransferCancelledError(TransportError):
    """The transfer ended because its caller cancelled it."""
