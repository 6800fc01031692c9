"""One transfer: its parts, each a transfer of NIXL's, and where they stand together."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvferry.core.errors import TransportError
from kvferry.core.memory import Region
from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.drivers.nixl.agent import Handle, Telemetry, TransferChunk, bare

AT_ONCE = 2
"""How many parts of a transfer NIXL has at once. When the peer dies, it fails one by one all copies
that it has: with 400,000 of them that took seconds, in which nothing was heard of the death."""

_PENDING = Status(state=State.PENDING)
_DONE = Status(state=State.DONE)


@dataclass(slots=True, kw_only=True, eq=False)
class NixlTransfer:
    """A transfer, of parts with one pair of memory kinds each.

    It is FAILING from the first error on, and nothing but ``settle`` makes it FAILED: when a part
    of it fails, NIXL does not say that the copies which it had begun have ended.

    Attributes:
        prepare: makes a transfer of NIXL's of a part when its turn has come, and not before: by
            then another agent may be the one to post it.
        local: the local regions that it uses.
        send: sends its notification. It is not bound to a transfer of NIXL's: that can have but
            one, and sends it even if the peer has been disconnected meanwhile. That a part has
            ended means, for NIXL, that its bytes are where they belong, on either side.
        waiting: the parts that are not posted yet; none once it is known to fail.
        running: the parts that NIXL has not called ended.
        ended: those that it has, of which the handles are still held.
        timed: what NIXL measured of the parts that ended well; ``None``: nobody asked.
    """

    id: TransferId
    peer: PeerId
    local: frozenset[Region]
    prepare: Callable[[TransferChunk], Handle]
    send: Callable[[], None] | None = None
    status: Status = _PENDING
    waiting: deque[TransferChunk] = field(default_factory=deque)
    running: list[Handle] = field(default_factory=list)
    ended: list[Handle] = field(default_factory=list)
    timed: list[Telemetry] | None = None

    @property
    def final(self) -> bool:
        """Whether its buffers are quiet."""
        return self.status.state.final

    @property
    def over(self) -> bool:
        """Whether NIXL has no part of it, and none is to come."""
        return not self.running and not self.waiting

    def post(self, parts: Iterable[TransferChunk]) -> None:
        """Start the first parts; ``advance`` starts the others."""
        self.waiting.extend(parts)
        self._post_some()
        self._conclude()

    def advance(self) -> None:
        """See which parts have ended, and start others."""
        for handle in list(self.running):
            try:
                ended = handle.agent.check(handle)
            except TransportError as exc:
                self._ended_badly(handle, exc)
                continue
            if ended:
                self._ended_well(handle)
        self._post_some()
        self._conclude()

    def doom(self, error: TransportError) -> None:
        """Let it fail; its first error stays."""
        if self.status.state is State.PENDING:
            self.status = Status(state=State.FAILING, error=bare(error))
            self.waiting.clear()

    def settle(self) -> None:
        """Be FAILED, if it is not final: no byte of it lands any more."""
        if not self.final:
            self.status = Status(state=State.FAILED, error=self.status.error)

    def release(self) -> list[TransportError]:
        """Give all handles back; what went wrong with that."""
        failed = []
        for handle in (*self.running, *self.ended):
            try:
                handle.agent.release(handle)
            except TransportError as exc:
                failed.append(exc)
        self.running.clear()
        self.ended.clear()
        return failed

    def _post_some(self) -> None:
        """Post as many parts as NIXL may have at once, but none after one that failed."""
        for _ in range(AT_ONCE - len(self.running)):
            if not self.waiting:
                break
            try:
                handle = self.prepare(self.waiting.popleft())
            except TransportError as exc:
                self._not_begun(exc)
                break
            self.running.append(handle)
            try:
                ended = handle.agent.post(handle)
            except TransportError as exc:
                self._ended_badly(handle, exc)
            else:
                if ended:
                    self._ended_well(handle)

    def _not_begun(self, error: TransportError) -> None:
        """A part that is not to be had. If no other moves, then the transfer is quiet."""
        self.doom(error)
        if not self.running:
            self.release()
            self.settle()

    def _ended_well(self, handle: Handle) -> None:
        self.running.remove(handle)
        if self.timed is not None:
            with contextlib.suppress(TransportError):
                self.timed.append(handle.agent.telemetry(handle))
        with contextlib.suppress(TransportError):
            handle.agent.release(handle)

    def _ended_badly(self, handle: Handle, error: TransportError) -> None:
        self.running.remove(handle)
        self.ended.append(handle)
        self.doom(error)

    def _conclude(self) -> None:
        if not self.over or self.status.state is not State.PENDING:
            return
        try:
            if self.send is not None:
                self.send()
        except TransportError as exc:
            # All bytes have landed: it is as quiet as one that is DONE.
            self.status = Status(state=State.FAILED, error=bare(exc))
        else:
            self.status = _DONE
