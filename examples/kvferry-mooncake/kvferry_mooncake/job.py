"""One transfer: its pieces, and where they stand together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.core.errors import PeerLostError, TransportError
from kvferry.core.memory import Region
from kvferry.core.transport import PeerId, State, Status
from kvferry_mooncake.engine import Engine
from kvferry_mooncake.mail import Channel
from kvferry_mooncake.pieces import Piece

WINDOW = 32
"""Pieces of one transfer that are under way at once: what a cancelled one still has to wait for."""


_PENDING = Status(state=State.PENDING)


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A transfer.

    It becomes FAILING with the first error, begins no piece from then on, and is FAILED when those
    that are under way have ended: the engine says so of each.
    """

    peer: PeerId
    segment: str
    channel: Channel
    local: frozenset[Region]
    pieces: Sequence[Piece]
    notify: bytes | None
    status: Status = _PENDING
    _next: int = 0
    _flying: list[int] = field(default_factory=list)

    @property
    def final(self) -> bool:
        """Whether the buffers are quiet."""
        return self.status.state.final

    def doom(self, error: TransportError) -> None:
        """Let it fail; the first error stays."""
        if self.status.state is State.PENDING:
            self.status = Status(state=State.FAILING, error=error)

    def advance(self, engine: Engine) -> None:
        """See which pieces have ended, begin more, and conclude after the last."""
        if self.final:
            return
        if self.channel.lost:
            self.doom(self.channel.error())
        self._flying = [batch for batch in self._flying if not self._has_ended(engine, batch)]
        while len(self._flying) < WINDOW and self._begun(engine):
            pass
        over = self.status.state is State.FAILING or self._next == len(self.pieces)
        if over and not self._flying:
            self._conclude()

    def _has_ended(self, engine: Engine, batch: int) -> bool:
        well = engine.ended(batch)
        if well is False:
            self._failed()
        return well is not None

    def _begun(self, engine: Engine) -> bool:
        if self.status.state is not State.PENDING or self._next == len(self.pieces):
            return False
        if not engine.has_room(self.segment):
            return False
        batch = engine.read(self.segment, *self.pieces[self._next])
        self._next += 1
        if batch is None:
            self._failed()
        else:
            self._flying.append(batch)
        return True

    def _failed(self) -> None:
        self.channel.turn()
        self.doom(
            self.channel.error()
            if self.channel.lost
            else PeerLostError(
                f"mooncake could not read from {self.segment}; its log says why (MC_LOG_LEVEL)"
            )
        )

    def _conclude(self) -> None:
        # The engine knows peers by host and port. Only this connection tells that whoever has
        # answered there is still the peer, and not a process that came after it.
        self.channel.turn()
        if self.channel.lost:
            self.doom(self.channel.error())
        if self.status.state is State.PENDING and self.notify is not None:
            try:
                self.channel.send(self.notify)
            except TransportError as exc:
                self.doom(exc)
        failed = self.status.state is State.FAILING
        self.status = Status(state=State.FAILED if failed else State.DONE, error=self.status.error)
