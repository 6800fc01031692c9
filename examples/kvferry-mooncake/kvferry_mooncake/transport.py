"""The transport: the hooks of ``BaseTransport``, over the modules beside it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Hashable, Sequence
from importlib.metadata import version
from typing import ClassVar

from kvferry.core.errors import ConnectError, DriverError, TransportError
from kvferry.core.memory import CPU, Region
from kvferry.core.transport import BaseTransport, Capabilities, Notification, Quiescence
from kvferry.core.transport.base import TransferRequest
from kvferry_mooncake import address as wire
from kvferry_mooncake.engine import shared
from kvferry_mooncake.notifications import MAX_NOTIFICATION, Channel, Mailbox
from kvferry_mooncake.pieces import pieces_of
from kvferry_mooncake.transfer import MooncakeConnection, MooncakeTransfer

_LIBRARY = "mooncake-transfer-engine-non-cuda"

_CLOSING_SECONDS = 0.02
"""How long ``close`` leaves peers to end what they have under way, once they know. What they find
deregistered ends too, but the engine then opens its connections anew, one in a second."""


class MooncakeTransport(BaseTransport[None, wire.Address, MooncakeConnection, MooncakeTransfer]):
    """Read through Mooncake's Transfer Engine, over tcp, from CPU memory to CPU memory.

    What it cannot do, and why:

    - ``background_progress``: the engine's threads serve peers by themselves, but tell the end of
      a piece only when asked, so ``poll`` asks, and begins the next pieces.
    - Memory other than ``cpu``: this build of the engine has none.

    A failed read is quiet by itself, because the engine tells the end of each piece. Of a peer that
    is stopped it does so after 30 s.

    Args:
        host: an address of this machine at which peers reach it. Everybody who reaches it can read
            what is registered: the engine has no secret.

    Raises:
        DriverError: mooncake is not installed, or the host is not this machine's.
    """

    interface_version: ClassVar[tuple[int, int]] = (2, 0)

    def __init__(self, *, host: str = "127.0.0.1") -> None:
        super().__init__(
            f"mooncake-{os.getpid()}-{secrets.token_hex(8)}",
            Capabilities(
                memory=frozenset({CPU}),
                max_notification=MAX_NOTIFICATION,
                cancel=True,
                background_progress=False,
                quiescence=Quiescence.ALWAYS,
            ),
        )
        self._host = host
        self._secret = secrets.token_bytes(16)
        self._engine = shared(host)
        try:
            self._mailbox = Mailbox(host, self._secret)
        except OSError as exc:
            raise DriverError(
                f"driver_options: host={host!r} cannot be listened at: {exc}"
            ) from exc

    @property
    def library(self) -> str:
        """Mooncake's distribution and its version."""
        return f"{_LIBRARY} {version(_LIBRARY)}"

    # Memory.

    def _register(self, region: Region) -> None:
        self._engine.register(region)

    def _deregister(self, region: Region, registration: None) -> None:
        self._engine.deregister(region)

    # Connections.

    def _address(self) -> bytes:
        return wire.encode(
            wire.Address(
                name=self.name,
                segment=self._engine.segment,
                host=self._host,
                port=self._mailbox.port,
                secret=self._secret,
                regions=[wire.Row(one.address, one.nbytes) for one in self._registered],
            )
        )

    def _decode_address(self, address: bytes) -> wire.Address:
        return wire.decode(address)

    def _identity(self, address: wire.Address) -> Hashable:
        return address.name

    def _connect(self, address: wire.Address) -> MooncakeConnection:
        channel = Channel(address, self.name)
        if not self._engine.meet(address.segment):
            channel.close()
            raise ConnectError(
                f"{address.name} answers, but mooncake at {address.segment} does not"
            )
        return MooncakeConnection(
            name=address.name,
            identity=self._identity(address),
            segment=address.segment,
            regions=wire.regions_of(address),
            channel=channel,
        )

    def _refresh(self, connection: MooncakeConnection, address: wire.Address) -> None:
        connection.regions = wire.regions_of(address)

    def _disconnect(
        self, connection: MooncakeConnection, transfers: Sequence[MooncakeTransfer]
    ) -> None:
        connection.channel.close()

    # Transfers.

    def _start(self, request: TransferRequest[MooncakeConnection]) -> MooncakeTransfer:
        transfer = MooncakeTransfer(
            engine=self._engine,
            connection=request.connection,
            pieces=pieces_of(request.copies),
            notify=request.notify,
        )
        transfer.advance()
        return transfer

    def _progress(self, transfers: Sequence[MooncakeTransfer]) -> None:
        self._mailbox.progress()
        for connection in self._peers.values():
            connection.channel.progress()
        # All of them, whichever the caller asks about: nobody else begins their next pieces.
        for transfer in self._unfinished():
            transfer.advance()

    def _fail(self, transfer: MooncakeTransfer, error: TransportError) -> None:
        transfer.fail(error)

    # Notifications.

    def _notify(self, connection: MooncakeConnection, payload: bytes) -> None:
        connection.channel.send(payload)

    def _receive(self) -> list[Notification]:
        return self._mailbox.take()

    def _close(self, transfers: Sequence[MooncakeTransfer]) -> None:
        for connection in self._peers.values():
            connection.channel.close()
        if self._mailbox.close():
            time.sleep(_CLOSING_SECONDS)
        for region in self._registered:
            self._engine.deregister(region)
