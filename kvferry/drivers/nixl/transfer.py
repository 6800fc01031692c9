"""One transfer of the driver, made of chunks; each chunk is a transfer of NIXL."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvferry.core.errors import PeerLostError, TransportError
from kvferry.core.transport import State, Status
from kvferry.drivers.nixl.agent import Handle, TransferChunk
from kvferry.drivers.nixl.descriptor_lists import PagedChunk
from kvferry.drivers.nixl.peer import NixlPeer

AT_ONCE = 2
"""Chunks posted at once; not more, as NIXL fails posted copies one by one if the peer dies."""

_PENDING, _DONE = Status(state=State.PENDING), Status(state=State.DONE)


@dataclass(slots=True, kw_only=True, eq=False)
class NixlTransfer:
    """A transfer, cut into chunks, each of which is one transfer of NIXL.

    It is FAILING from its first error on. NIXL does not report when the copies of a failed chunk
    have ended, so it becomes FAILED only by ``settle``. It is FAILED at once only if no copy can be
    under way: if a chunk could not be prepared while no other was running, or if only the flush or
    the notification failed.
    """

    peer: NixlPeer
    # Called just before a chunk is posted: the agent that posts may change until then.
    prepare: Callable[[TransferChunk | PagedChunk], Handle]
    # Makes what has arrived visible to the GPU's new work, before ``send``.
    flush: Callable[[], None] | None = None
    # NIXL's own bound notifications are not used: it sends them even if the peer was disconnected.
    send: Callable[[], None] | None = None
    status: Status = _PENDING
    # Not posted yet; empty once the transfer has failed.
    waiting: deque[TransferChunk | PagedChunk] = field(default_factory=deque)
    running: list[Handle] = field(default_factory=list)
    ended: list[Handle] = field(default_factory=list)  # of failed chunks, until ``release``

    @property
    def final(self) -> bool:
        """Whether the transfer is DONE or FAILED: it touches no memory any more."""
        return self.status.state.final

    @property
    def drained(self) -> bool:
        """Whether no chunk is running, and none waits to be posted."""
        return not self.running and not self.waiting

    def post(self, chunks: Iterable[TransferChunk | PagedChunk]) -> None:
        """Post the first ``AT_ONCE`` chunks, and keep the others for ``advance`` to post."""
        self.waiting.extend(chunks)
        self._post_some()
        self._conclude()

    def advance(self) -> None:
        """Make progress with the running chunks, and post a waiting chunk for each that ended."""
        for handle in list(self.running):
            self._note(handle, handle.agent.check)
        if self.waiting or not self.running:
            self._post_some()
            self._conclude()

    def fail(self, error: TransportError) -> None:
        """Make a PENDING transfer FAILING. If it is FAILING already, its first error stays."""
        if self.status.state is State.PENDING:
            self._failed(State.FAILING, error)
            self.waiting.clear()

    def settle(self) -> None:
        """Make a FAILING transfer, of which no byte can land any more, FAILED."""
        if not self.final:
            self.status = Status(state=State.FAILED, error=self.status.error)

    def release(self) -> None:
        """Release the handles of chunks that run or have failed."""
        for handle in (*self.running, *self.ended):
            handle.agent.release(handle)
        self.running.clear()
        self.ended.clear()

    def _post_some(self) -> None:
        """Post waiting chunks so that at most ``AT_ONCE`` are running; stop at the first error."""
        for _ in range(AT_ONCE - len(self.running)):
            if not self.waiting:
                break
            try:
                handle = self.prepare(self.waiting.popleft())
            except TransportError as exc:
                self.fail(exc)
                # Nothing of this chunk has begun. If no other runs either, no memory is touched.
                if not self.running:
                    self.release()
                    self.settle()
                break
            self.running.append(handle)
            self._note(handle, handle.agent.post)

    def _note(self, handle: Handle, step: Callable[[Handle], bool]) -> None:
        """Post or check a running chunk, and note its end."""
        try:
            if not step(handle):
                return
        except TransportError as exc:
            self.running.remove(handle)
            self.ended.append(handle)
            self.fail(exc)
            return
        self.running.remove(handle)
        handle.agent.release(handle)

    def _conclude(self) -> None:
        if not self.drained or self.status is not _PENDING:
            return
        try:
            if self.flush is not None:
                self.flush()
            if self.send is not None:
                self.send()
        except TransportError as exc:
            # All bytes have landed, so the transfer is final.
            self._failed(State.FAILED, exc)
        else:
            self.status = _DONE

    def _failed(self, state: State, error: TransportError) -> None:
        self.status = Status(state=state, error=error.with_traceback(None))
        self.peer.failed = True  # so that it does not become idle (see ``IdlePeers``)
        if isinstance(error, PeerLostError):
            self.peer.mark_lost()
