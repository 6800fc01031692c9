"""Why something failed, in a word for figures and logs, and what to do about it."""

from __future__ import annotations

import enum

from kvferry.core.errors import (
    AdmissionError,
    ConnectError,
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
    """The producer did not hold the pages any more."""
    DEADLINE = "deadline"
    """It was not over in time."""
    GIVEN_UP = "given_up"
    """Its engine wanted it no more: the client went away, say."""
    TICKET = "ticket"
    """The handshake denies what the ticket says."""
    ADMISSION = "admission"
    """One engine does not admit the other."""
    INCOMPATIBLE = "incompatible"
    """Two engines must not exchange pages, or their layouts cannot be matched."""
    UNREACHABLE = "unreachable"
    """No handshake, or no connection."""
    PEER_LOST = "peer_lost"
    """The producer died, restarted or was disconnected."""
    TRANSPORT = "transport"
    """The driver failed."""
    PAGES = "pages"
    """The page lists do not fit."""
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
)
"""The first that fits counts."""

_REMEDIES = {
    Cause.TICKET: "prefill again, and let the router pass kv_transfer_params on as they are",
    Cause.INCOMPATIBLE: (
        "start both engines alike in what is named, or let the router pair others; 'kvferry plan' "
        "tries layouts"
    ),
    Cause.PEER_LOST: (
        "if it was not stopped on purpose, its log says why; it is used again when it is back"
    ),
    Cause.TRANSPORT: "'kvferry doctor' looks at what the driver needs on this machine",
    Cause.PAGES: "let the router pass kv_transfer_params on as they are",
    Cause.OTHER: "please report it, with this log",
}
"""The other causes' errors say themselves what to do, or there is nothing to be done."""


RAISE_LIMITS = "let this process have more files and threads (ulimit -n and -u)"
"""What to do where the operating system gives no more of them; goes with what it said."""


def cause_of(error: KVFerryError) -> Cause:
    """Why, in a word."""
    found = (cause for kind, cause in _CAUSES if isinstance(error, kind))
    return next(found, Cause.OTHER)


def with_remedy(error: KVFerryError) -> str:
    """What failed and what to do, in one line."""
    remedy = _REMEDIES.get(cause_of(error), "")
    text = on_one_line(str(error))
    return f"{text} ({remedy})" if remedy else text


def on_one_line(text: str, limit: int = 4096) -> str:
    """What others wrote (a ticket, a peer, a library), so that it cannot look like lines of ours.

    Args:
        text: of any length.
        limit: characters that are kept.
    """
    words = " ".join(text[:limit].split())
    return "".join(each if each.isprintable() else "?" for each in words)
