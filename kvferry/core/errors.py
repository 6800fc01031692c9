"""All exceptions that kvferry raises."""

from __future__ import annotations

import enum
from typing import ClassVar


class Cause(enum.StrEnum):
    """Why a load failed."""

    STALE = "stale"
    """The producer no longer held the pages."""
    DEADLINE = "deadline"
    """The load did not end in time."""
    GIVEN_UP = "given_up"
    """The engine gave the load up, for instance because the client disconnected."""
    TICKET = "ticket"
    """The handshake contradicts the ticket."""
    ADMISSION = "admission"
    """One engine does not admit the key or address of the other."""
    INCOMPATIBLE = "incompatible"
    """The two engines must not exchange pages, or their layouts do not match."""
    UNREACHABLE = "unreachable"
    """The handshake or the connection failed."""
    PEER_LOST = "peer_lost"
    """The producer died, restarted or was disconnected."""
    TRANSPORT = "transport"
    """The driver failed."""
    PAGES = "pages"
    """The page lists do not fit."""
    COPY = "copy"
    """The pages were loaded into host memory, and could not be copied to the device."""
    OTHER = "other"


class KVFerryError(Exception):
    """Base class of all exceptions that kvferry raises."""

    cause: ClassVar[Cause] = Cause.OTHER
    """The cause under which metrics count a load that failed with this error."""


class LayoutError(KVFerryError, ValueError):
    """A layout describes memory outside its regions, or the same memory twice."""


class PlanError(KVFerryError):
    """The memory layouts of two engines do not match; the message names what does not."""

    cause = Cause.INCOMPATIBLE


class PageError(KVFerryError, ValueError):
    """A list of page ids has an invalid id, lacks a page, or has too few pages."""

    cause = Cause.PAGES


class WireError(KVFerryError, ValueError):
    """Bytes from a peer are not a valid message of this protocol."""


class HandshakeError(KVFerryError):
    """A peer could not be reached, or its answer is not valid."""

    cause = Cause.UNREACHABLE


class RefusedError(HandshakeError):
    """A side channel refused a request, for instance since it serves another engine."""


class AdmissionError(HandshakeError):
    """An engine does not admit the other's key or address; the message names the setting."""

    cause = Cause.ADMISSION


class IncompatibleError(HandshakeError):
    """Two engines must not exchange pages; the message names each difference, with both values."""

    cause = Cause.INCOMPATIBLE


class TicketReason(enum.StrEnum):
    """Why a ticket is refused."""

    MALFORMED = "malformed"
    """A part of the ticket is missing, of the wrong type, or out of bounds."""
    FOREIGN = "foreign"
    """Another connector made the ticket."""
    VERSION = "version"
    SIGNATURE = "signature"
    """The signature is missing or wrong: altered, forged, or made with other secrets."""
    PROOF = "proof"
    """No valid proof shows which engine made the ticket: altered, forged, or proof removed."""
    ROLE = "role"
    """The role of this engine (``kv_role``) does not allow it to load pages."""
    OWN = "own"
    """This engine itself made the ticket."""
    PROMPT = "prompt"
    """The ticket was made for another prompt."""
    LIST = "list"
    """The ticket was made for the first prompt of a request, and this is a further one of it."""
    ADAPTER = "adapter"
    """The content of the request's LoRA adapter is not known here, or is not what was loaded."""
    WEIGHTS = "weights"
    """The ticket's pages were computed with other weights than this engine has."""
    TOKENS = "tokens"
    """The ticket's recurrent states and sliding windows end at another number of tokens."""
    ADMISSION = "admission"
    """This engine does not admit the key of the engine that made the ticket."""
    RESTARTED = "restarted"
    """The engine that made the ticket has been restarted since."""
    HOST_PAGES = "host_pages"
    """This engine stages its cache, and has no host pages for the load."""
    MISMATCH = "mismatch"
    """The ticket contradicts the handshake about the shape of the engine that made the ticket."""


NOT_THE_TICKET = frozenset(
    {
        TicketReason.ROLE,
        TicketReason.LIST,
        TicketReason.ADAPTER,
        TicketReason.WEIGHTS,
        TicketReason.HOST_PAGES,
    }
)
"""The reasons for which a new ticket would be refused as well; the errors name the remedy."""


class TicketError(KVFerryError, ValueError):
    """A ticket is refused before anything is read; ``reason`` is a label for metrics."""

    cause = Cause.TICKET

    def __init__(self, text: str = "", *, reason: TicketReason = TicketReason.MALFORMED) -> None:
        super().__init__(text)
        self.reason = reason


class SecretError(KVFerryError, ValueError):
    """A key, secret or access list is missing or invalid; the message never shows a secret."""


class StaleError(KVFerryError):
    """The producer stopped holding the pages before the read ended: do not use the bytes."""

    cause = Cause.STALE


class DeadlineError(KVFerryError):
    """A load did not end in time; the message names the stage that the load was in."""

    cause = Cause.DEADLINE


class CopyError(KVFerryError):
    """Pages could not be copied between the device and host memory; nothing is under way."""

    cause = Cause.COPY


class EndpointClosedError(KVFerryError):
    """The endpoint has been closed."""

    cause = Cause.GIVEN_UP


class DriverError(KVFerryError):
    """A driver cannot be found, loaded or used; the message says what to do."""


class TransportError(KVFerryError):
    """Base class of errors that a driver raises, or reports for a failed transfer."""

    cause = Cause.TRANSPORT


class TransportUsageError(TransportError, ValueError):
    """A mistake of the caller: an unknown id, an unregistered range, a closed transport."""


class TransportUnsupportedError(TransportError):
    """The driver cannot do this, as its capabilities declare."""


class ConnectError(TransportError):
    """A connection to a peer cannot be made; the message says why and what to change."""

    cause = Cause.UNREACHABLE


class PeerLostError(TransportError):
    """The peer died, restarted or was disconnected."""

    cause = Cause.PEER_LOST


class StatusUnknownError(TransportError):
    """A transfer's status cannot be told: bytes may land until ``disconnect`` has returned."""


class TransferCancelledError(TransportError):
    """The transfer failed because ``cancel`` was called for it."""

    cause = Cause.GIVEN_UP


def kept(error: Exception) -> KVFerryError:
    """Return an error, or one that names it, that can be kept: see ``forget_frames``."""
    if not isinstance(error, KVFerryError):
        error = HandshakeError(f"failed: {error!r}")
    forget_frames(error)
    return error


def forget_frames(error: BaseException | None) -> None:
    """Remove the tracebacks from an error and its causes.

    The frames' local variables would stay in memory for as long as the error is kept.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
