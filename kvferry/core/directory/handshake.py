"""The handshake with a producer: its reply, as it came, of the first address that fits."""

from __future__ import annotations

import time

import msgspec

from kvferry.core.directory.news import EncodedReply
from kvferry.core.errors import HandshakeError, WireError
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.options import EndpointOptions
from kvferry.core.security.ticket_proof import load_library
from kvferry.core.side_channel.client import ReplyLimits, payloads
from kvferry.core.side_channel.connection import explained
from kvferry.core.side_channel.dialer import Dialer
from kvferry.core.side_channel_messages import MAX_PAYLOAD_BYTES, RandomBits, decode


async def fetched(key: PeerKey, options: EndpointOptions, limits: ReplyLimits) -> EncodedReply:
    """Return a producer's reply, of the first address that has ``key.ticket_key``.

    The last address's reply is returned whatever its key is; the addresses share the timeout.
    Raises ``HandshakeError``, which says why each failed, if there is no reply to return.
    """
    deadline = time.monotonic() + options.handshake_timeout
    begun = time.perf_counter()
    addresses, failures = list(key.addresses), list[HandshakeError]()
    while True:
        address, left = addresses.pop(0), max(deadline - time.monotonic(), 0.0)
        dialer = Dialer.to(address, left / (1 + len(addresses)), options.access)
        try:
            found = await payloads(dialer, key.engine, limits)
            with explained(key.engine, dialer):
                incarnation = _incarnation_of(found.ranks[0], key.engine)
            # Another key means another engine with the same id: a loopback address, for instance,
            # leads to another engine on each host.
            if found.ticket_key == key.ticket_key or not addresses:
                if found.ticket_key:
                    load_library()
                reply = EncodedReply(
                    address=address,
                    incarnation=incarnation,
                    ranks=tuple(found.ranks),
                    ticket_key=found.ticket_key,
                    numeric=dialer.found,
                    seconds=time.perf_counter() - begun,
                )
                limits.made(reply.nbytes)
                return reply
        except HandshakeError as exc:
            failures.append(exc)
            if not addresses:
                raise type(exc)("; and ".join(map(str, failures))) from exc


class _PayloadStart(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a rank's payload before all of it is decoded and checked."""

    engine: str
    incarnation: RandomBits


_decoder = msgspec.msgpack.Decoder(_PayloadStart)


def _incarnation_of(payload: bytes, engine: str) -> Incarnation:
    """Return the incarnation in a payload, which is untrusted, or refuse the payload."""
    try:
        start = decode(_decoder, payload, MAX_PAYLOAD_BYTES, "payload")
    except WireError as exc:
        raise HandshakeError(f"payload of rank 0: {exc}") from exc
    if start.engine != engine:
        raise HandshakeError(f"it answered with the ranks of engine {start.engine!r}")
    return Incarnation(start.incarnation)
