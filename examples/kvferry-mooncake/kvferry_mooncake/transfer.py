"""A connection, and one transfer: its pieces, and the status of them together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from kvferry.core.errors import PeerLostError, TransportError
from kvferry.core.memory import Region
from kvferry.core.transport import State, Status
from kvferry_mooncake.engine import Engine
from kvferry_mooncake.notifications import Channel
from kvferry_mooncake.pieces import Piece

WINDOW = 32
"""Pieces of one transfer that are under way at once: what a cancelled one still has to wait for."""

_PENDING = Status(state=State.PENDING)


@dataclass(slots=True, kw_only=True, eq=False)
class MooncakeConnection:
    """A connected peer: its name (its ``identity``), its engine, the regions that are known.

    The end of the ``channel`` for notifications tells that the peer is gone.
    """

    name: str
    identity: Hashable
    segment: str
    regions: frozenset[Region]
    channel: Channel


@dataclass(slots=True, kw_only=True, eq=False)
class MooncakeTransfer:
    """A read.

    It becomes FAILING with the first error, begins no piece from then on, and is FAILED when those
    that are under way have ended: the engine says so of each.
    """

    engine: Engine
    connection: MooncakeConnection
    pieces: Sequence[Piece]
    notify: bytes | None
    status: Status = _PENDING
    _next: int = 0
    _running: list[int] = field(default_factory=list)

    def fail(self, error: TransportError) -> None:
        """Make it FAILING, if it is PENDING; the first error stays."""
        if self.status.state is State.PENDING:
            self.status = Status(state=State.FAILING, error=error)

    def advance(self) -> None:
        """Look which pieces have ended, begin more, and conclude after the last."""
        if self.status.state.final:
            return
        self._check_peer()
        self._running = [batch for batch in self._running if not self._has_ended(batch)]
        while self._may_begin():
            self._begin()
        if not self._running and (self._next == len(self.pieces) or not self._pending):
            self._conclude()

    @property
    def _pending(self) -> bool:
        return self.status.state is State.PENDING

    def _check_peer(self) -> None:
        if self.connection.channel.lost:
            self.fail(self.connection.channel.error())

    def _has_ended(self, batch: int) -> bool:
        succeeded = self.engine.ended(batch)
        if succeeded is False:
            self._piece_failed()
        return succeeded is not None

    def _may_begin(self) -> bool:
        return (
            self._pending
            and self._next < len(self.pieces)
            and len(self._running) < WINDOW
            and self.engine.has_room(self.connection.segment)
        )

    def _begin(self) -> None:
        batch = self.engine.read(self.connection.segment, *self.pieces[self._next])
        self._next += 1
        if batch is None:
            self._piece_failed()
        else:
            self._running.append(batch)

    def _piece_failed(self) -> None:
        self.connection.channel.progress()
        self._check_peer()
        self.fail(
            PeerLostError(
                f"mooncake could not read from {self.connection.segment}; its log says why "
                "(MC_LOG_LEVEL)"
            )
        )

    def _conclude(self) -> None:
        # The engine knows peers by host and port. Only this connection tells that the process that
        # has answered there is still the peer, and not one that came after it.
        self.connection.channel.progress()
        self._check_peer()
        if self._pending and self.notify is not None:
            try:
                self.connection.channel.send(self.notify)
            except TransportError as exc:
                self.fail(exc)
        end = State.DONE if self._pending else State.FAILED
        self.status = Status(state=end, error=self.status.error)
