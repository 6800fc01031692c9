"""Classify errors for metrics and logs, and say what to do about them."""

from __future__ import annotations

import enum

from kvferry.core.errors import (
    NOT_THE_TICKET,
    AdmissionError,
    ConnectError,
    CopyError,
    DeadlineError,
    EndpointClosedError,
    HandshakeError,
    IncompatibleError,
    KVFerryError,
    PageError,
    PeerLostError,
    PlanError,
    RefusedError,
    StaleError,
    TicketError,
    TransferCancelledError,
    TransportError,
)


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


_CAUSES: tuple[tuple[type[KVFerryError], Cause], ...] = (
    (StaleError, Cause.STALE),
    (DeadlineError, Cause.DEADLINE),
    (EndpointClosedError, Cause.GIVEN_UP),
    (TransferCancelledError, Cause.GIVEN_UP),
    (TicketError, Cause.TICKET),
    (AdmissionError, Cause.ADMISSION),
    (RefusedError, Cause.UNREACHABLE),
    (IncompatibleError, Cause.INCOMPATIBLE),
    (PlanError, Cause.INCOMPATIBLE),
    (HandshakeError, Cause.UNREACHABLE),
    (ConnectError, Cause.UNREACHABLE),
    (PeerLostError, Cause.PEER_LOST),
    (TransportError, Cause.TRANSPORT),
    (PageError, Cause.PAGES),
    (CopyError, Cause.COPY),
)
"""The first entry with a matching class applies."""

_REMEDIES = {
    Cause.TICKET: "prefill again, and let the router pass kv_transfer_params on as they are",
    Cause.INCOMPATIBLE: (
        "start both engines with the same values of what is named, or let the router pair other "
        "engines; 'kvferry plan' tries layouts"
    ),
    Cause.PEER_LOST: (
        "if the engine was not stopped on purpose, its log says why; it is used again when it is "
        "back"
    ),
    Cause.TRANSPORT: "'kvferry doctor' checks what the driver needs on this machine",
    Cause.PAGES: "let the router pass kv_transfer_params on as they are",
    Cause.OTHER: "please report it, with this log",
}
"""Errors of other causes name their remedy themselves, or have none."""


RAISE_LIMITS = "let this process have more files and threads (ulimit -n and -u)"
"""The remedy where the operating system refuses files or threads, after the system's message."""


def cause_of(error: KVFerryError) -> Cause:
    """Return the cause under which metrics count an error."""
    causes = (cause for kind, cause in _CAUSES if isinstance(error, kind))
    return next(causes, Cause.OTHER)


def with_remedy(error: KVFerryError) -> str:
    """Return the error's text on one line, followed by what to do, if this is known."""
    remedy = _REMEDIES.get(cause_of(error), "")
    if isinstance(error, TicketError) and error.reason in NOT_THE_TICKET:
        remedy = ""
    text = on_one_line(str(error))
    return f"{text} ({remedy})" if remedy else text


def on_one_line(text: str, limit: int = 4096) -> str:
    """Return untrusted text as one line of a log, which cannot forge further lines."""
    line = " ".join(text[:limit].split())
    return "".join(each if each.isprintable() else "?" for each in line)
