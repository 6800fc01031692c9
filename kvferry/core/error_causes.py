"""Say on one line of a log what went wrong, and what to do about it."""

from __future__ import annotations

from kvferry.core.errors import NOT_THE_TICKET, Cause, KVFerryError, TicketError

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


def with_remedy(error: KVFerryError) -> str:
    """Return the error's text on one line, followed by what to do, if this is known."""
    remedy = _REMEDIES.get(error.cause, "")
    if isinstance(error, TicketError) and error.reason in NOT_THE_TICKET:
        remedy = ""
    text = on_one_line(str(error))
    return f"{text} ({remedy})" if remedy else text


def on_one_line(text: str, limit: int = 4096) -> str:
    """Return untrusted text as one line of a log, which cannot forge further lines."""
    line = " ".join(text[:limit].split())
    return "".join(each if each.isprintable() else "?" for each in line)
