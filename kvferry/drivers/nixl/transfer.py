"""One transfer: its chunks, each a transfer of NIXL's, and the status of them together."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvferry.core.errors import TransportError
from kvferry.core.transport import State, Status
from kvferry.drivers.nixl.agent import Handle, Telemetry, TransferChunk, bare
from kvferry.drivers.nixl.peer import NixlPeer

AT_ONCE = 2
"""How many chunks of a transfer NIXL has at once. When the peer dies, it fails one by one all
copies that it has: with 400,000 of them that took seconds, in which the death stayed unknown."""

_PENDING = Status(state=State.PENDING)
_DONE = Status(state=State.DONE)


@dataclass(slots=True, kw_only=True, eq=False)
class NixlTransfer:
    """A transfer, of chunks with one pair of memory kinds each.

    It is FAILING from the first error on, and nothing but ``settle`` makes it FAILED: when a chunk
    fails, NIXL does not say that the copies which it had begun have ended.

    Attributes:
        peer: the peer's connection.
        prepare: makes NIXL's transfer of a chunk. It is called when the chunk is posted and not
            before, because another agent may be the one that posts by then.
        send: sends the bound notification. It is not bound to a transfer of NIXL's: that can have
            only one, and NIXL sends it even if the peer has been disconnected meanwhile. When NIXL
            says that a chunk has ended, its bytes have landed, on either side.
        status: the status that ``poll`` answers with.
        waiting: the chunks that are not posted yet; none once the transfer is known to fail.
        running: the handles of the chunks that have not ended.
        ended: the handles of those that failed; they are held until ``release``.
        telemetry: what NIXL measured of the chunks that ended well; ``None``: not asked for.
    """

    peer: NixlPeer
    prepare: Callable[[TransferChunk], Handle]
    send: Callable[[], None] | None = None
    status: Status = _PENDING
    waiting: deque[TransferChunk] = field(default_factory=deque)
    running: list[Handle] = field(default_factory=list)
    ended: list[Handle] = field(default_factory=list)
    telemetry: list[Telemetry] | None = None

    @property
    def final(self) -> bool:
        """Whether the buffers are quiet."""
        return self.status.state.final

    @property
    def drained(self) -> bool:
        """Whether NIXL has no chunk of it, and no other is to be posted."""
        return not self.running and not self.waiting

    def post(self, chunks: Iterable[TransferChunk]) -> None:
        """Post the first chunks; ``advance`` posts the others."""
        self.waiting.extend(chunks)
        self._post_some()
        self._conclude()

    def advance(self) -> None:
        """Look which chunks have ended, and post others."""
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

    def fail(self, error: TransportError) -> None:
        """Make it FAILING, if it is PENDING; the first error stays."""
        if self.status.state is State.PENDING:
            self.status = Status(state=State.FAILING, error=bare(error))
            self.waiting.clear()

    def settle(self) -> None:
        """Make it FAILED, unless it is final: no byte of it can land any more."""
        if not self.final:
            self.status = Status(state=State.FAILED, error=self.status.error)

    def release(self) -> list[TransportError]:
        """Release all handles.

        Returns:
            What went wrong.
        """
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
        """Post as many chunks as NIXL may have at once, but none after one that failed."""
        for _ in range(AT_ONCE - len(self.running)):
            if not self.waiting:
                break
            try:
                handle = self.prepare(self.waiting.popleft())
            except TransportError as exc:
                self._not_prepared(exc)
                break
            self.running.append(handle)
            try:
                ended = handle.agent.post(handle)
            except TransportError as exc:
                self._ended_badly(handle, exc)
            else:
                if ended:
                    self._ended_well(handle)

    def _not_prepared(self, error: TransportError) -> None:
        self.fail(error)
        # Nothing of this chunk has begun. If no other is running either, the transfer is quiet.
        if not self.running:
            self.release()
            self.settle()

    def _ended_well(self, handle: Handle) -> None:
        self.running.remove(handle)
        if self.telemetry is not None:
            with contextlib.suppress(TransportError):
                self.telemetry.append(handle.agent.telemetry(handle))
        with contextlib.suppress(TransportError):
            handle.agent.release(handle)

    def _ended_badly(self, handle: Handle, error: TransportError) -> None:
        self.running.remove(handle)
        self.ended.append(handle)
        self.fail(error)

    def _conclude(self) -> None:
        """Send the notification and become DONE, if all chunks have ended well."""
        if not self.drained or self.status.state is not State.PENDING:
            return
        try:
            if self.send is not None:
                self.send()
        except TransportError as exc:
            # All bytes have landed: it is as quiet as one that is DONE.
            self.status = Status(state=State.FAILED, error=bare(exc))
        else:
            self.status = _DONE
