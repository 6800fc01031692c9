"""Engines that publish the transport addresses of another engine under a name of their own."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import msgspec

from kvferry.core.lifecycle.holds import random_incarnation
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.side_channel import HandshakeServer
from kvferry.core.side_channel_messages import encode
from tests.core.endpoint.engines import Engine


class AliasEngine:
    """The side channel of an alias."""

    def __init__(self, server: HandshakeServer, incarnation: int) -> None:
        self.server = server
        self._incarnation = incarnation

    def ticket(self, ticket: Ticket) -> Ticket:
        """Return a ticket of the real engine as if the alias had made it."""
        return dataclasses.replace(
            ticket,
            engine="alias",
            incarnation=self._incarnation,
            host=self.server.host,
            port=self.server.port,
        )


@contextlib.contextmanager
def alias_engine(real: Engine) -> Iterator[AliasEngine]:
    """Serve the payloads of an engine under the name ``alias``."""
    incarnation = random_incarnation()
    payloads = [
        encode(msgspec.structs.replace(r.endpoint.payload, engine="alias", incarnation=incarnation))
        for r in real.ranks
    ]
    with HandshakeServer(payloads, engine="alias", incarnation=incarnation) as server:
        yield AliasEngine(server, incarnation)
