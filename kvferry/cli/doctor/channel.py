"""Check side channels (TCP, for handshakes): one opened here, and that of a running engine."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.cli.doctor.finding import Check, Finding
from kvferry.cli.side_channel import NONE, Keys
from kvferry.core.errors import AdmissionError, HandshakeError, RefusedError
from kvferry.core.layout import Group, GroupKind, Layout
from kvferry.core.lifecycle.holds import random_incarnation
from kvferry.core.memory import Region
from kvferry.core.messages import Coordinates, RankPayload
from kvferry.core.side_channel.client import ping
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.side_channel.sockets import own_address
from kvferry.core.side_channel_messages import NEWEST_PROTOCOL, OLDEST_PROTOCOL, encode

LOOPBACK = "127.0.0.1"
SECONDS = 5.0
ENGINE = "kvferry-doctor"


def channels() -> Iterator[Finding]:
    """Yield findings about a side channel on the loopback address and on this host's address."""
    yield _served(LOOPBACK, "the default of side_channel_host: only engines on this host reach it")
    address = own_address()
    if address is None:
        yield Check("side channel").warn(
            "this host has no route but to itself: engines of other hosts cannot reach it",
            "connect it to a network, unless both engines run here",
        )
    else:
        yield _served(address, "for engines on several hosts, set side_channel_host to it")


def _served(host: str, use: str) -> Finding:
    check = Check(f"side channel at {host}")
    payload = _payload()
    try:
        with HandshakeServer(
            [encode(payload)], engine=ENGINE, incarnation=payload.incarnation, host=host
        ) as server:
            answered = ping(host, server.port, ENGINE, timeout=SECONDS)
    except HandshakeError as exc:
        return check.bad(
            _why(exc),
            "let this host reach its own ports by TCP at that address, or set side_channel_host to "
            "another",
        )
    if answered != payload.incarnation:
        return check.bad("another process answered", "find out what redirects connections here")
    return check.ok(f"bound, and reached from here; {use}")


def running(host: str, port: int, engine: str | None, keys: Keys = NONE) -> Finding:
    """Return the finding about the side channel of a running engine."""
    check = Check(f"engine at {host} port {port}")
    access, key = keys.access, keys.server
    try:
        incarnation = ping(host, port, engine or ENGINE, timeout=SECONDS, access=access, key=key)
    except RefusedError as exc:
        if engine is None:
            return check.ok(f"a side channel of kvferry answers; it {_why(exc)}")
        return check.bad(
            f"it {_why(exc)}", "correct --engine, or the port: it is of another engine"
        )
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
    return check.ok(f"engine {engine} answers, incarnation {incarnation}")


def _why(error: HandshakeError) -> str:
    """Return an error's text without the side channel's address: the finding's name has it."""
    return str(error.__cause__ or error)


def _payload() -> RankPayload:
    """Return a rank's handshake payload, with an empty layout, for the side channel to serve."""
    return RankPayload(
        oldest=OLDEST_PROTOCOL,
        newest=NEWEST_PROTOCOL,
        engine=ENGINE,
        incarnation=random_incarnation(),
        rank=0,
        coordinates=Coordinates(),
        agreement={},
        layout=Layout(regions=(), groups=(Group(kind=GroupKind.PAGED, block_tokens=1),), fields=()),
        driver="none",
        address=b"",
        slots=Region(address=32, nbytes=8),
        lease=1.0,
        fingerprint=Region(address=16, nbytes=16),
        watermarks=Region(address=40, nbytes=8),
    )
