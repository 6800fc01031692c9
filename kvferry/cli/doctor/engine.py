"""Check whether a running engine answers, from here."""

from __future__ import annotations

from kvferry.cli.doctor.finding import Check, Finding
from kvferry.cli.side_channel import Keys
from kvferry.core.errors import AdmissionError, HandshakeError
from kvferry.core.side_channel.connection import health

SECONDS = 5.0


def running(host: str, port: int, engine: str | None, keys: Keys) -> Finding:
    """Return the finding about the side channel of a running engine, by its id if that is given."""
    check = Check(f"engine at {host} port {port}")
    try:
        found = health(host, port, timeout=SECONDS, **keys).engine
    except AdmissionError as exc:
        return check.warn(
            f"a side channel is there, and does not admit everybody: {_why(exc)}. Host and port "
            "are right; engines with keys may reach it all the same",
            "to ask it, list this command's public key in the engine's curve_peers ('kvferry "
            "keygen DIR --engine probe' makes a pair), and name the secret key with "
            "--curve-secret-key and the engine's public key with --curve-peer",
        )
    except HandshakeError as exc:
        return check.bad(
            _why(exc),
            "start the engine, or correct HOST:PORT: they are its side_channel_host, an address "
            "that is reached from here, and its side_channel_port",
        )
    if engine not in (None, found):
        return check.bad(
            f"this is engine {found!r}", "correct --engine, or the port: it is of another engine"
        )
    return check.ok(f"engine {found} answers")


def _why(error: HandshakeError) -> str:
    """Return an error's text without the side channel's address: the finding's name has it."""
    return str(error.__cause__ or error)
