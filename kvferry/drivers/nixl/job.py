"""One transfer: its parts, each a transfer of NIXL's, and where they stand together."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.core.errors import TransportError
from kvferry.core.memory import Region
from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.drivers.nixl.agent import Agent, Handle, Telemetry, bare

AT_ONCE = 2
"""How many parts of a transfer NIXL has at once. When the peer dies, it fails one by one all copies
that it has: with 400,000 of them that took seconds, in which nothing was heard of the death."""

_PENDING = Status(state=State.PENDING)
_DONE = Status(state=State.DONE)


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A transfer, of parts with one pair of memory kinds each.

    It is DOOMED from the first error on, and nothing but ``settle`` makes it FAILED: when a part
    of it fails, NIXL does not say that the copies which it had begun have ended.

    Attributes:
        name: the peer's agent.
        local: the local regions that it uses.
        send: sends its notification. It is not bound to a transfer of NIXL's: that can have but
            one, and sends it even if the peer has been disconnected meanwhile. That a part has
            ended means, for NIXL, that its bytes are where they belong, on either side.
        waiting: the parts that are not posted yet.
        running: the parts that NIXL has not called ended.
        ended: those that it has, of which the handles are still held.
        timed: what NIXL measured of the parts that ended well; ``None``: nobody asked.
    """

    id: TransferId
    peer: PeerId
    name: str
    local: frozenset[Region]
    send: Callable[[], None] | None = None
    status: Status = _PENDING
    waiting: deque[Handle] = field(default_factory=deque)
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
        return not self.running and not (self.waiting and self.status.state is State.PENDING)

    def post(self, agent: Agent, handles: list[Handle]) -> None:
        """Start the first parts; ``advance`` starts the others."""
        self.waiting.extend(handles)
        self._post_some(agent)
        self._conclude()

    def advance(self, agent: Agent) -> None:
        """See which parts have ended, and start others."""
        for handle in list(self.running):
            try:
                ended = agent.check(handle, self.name)
            except TransportError as exc:
                self._ended_badly(handle, exc)
                continue
            if ended:
                self._ended_well(agent, handle)
        self._post_some(agent)
        self._conclude()

    def doom(self, error: TransportError) -> None:
        """Let it fail; its first error stays."""
        if self.status.state is State.PENDING:
            self.status = Status(state=State.DOOMED, error=bare(error))

    def settle(self, agent: Agent) -> list[TransportError]:
        """Give all handles back, and be FAILED; what went wrong with that."""
        failed = _release(agent, [*self.waiting, *self.running, *self.ended])
        self.waiting.clear()
        self.running.clear()
        self.ended.clear()
        if not self.final:
            self.status = Status(state=State.FAILED, error=self.status.error)
        return failed

    def _post_some(self, agent: Agent) -> None:
        """Post as many parts as NIXL may have at once, but none after one that failed."""
        for _ in range(AT_ONCE - len(self.running)):
            if not self.waiting or self.status.state is not State.PENDING:
                break
            handle = self.waiting.popleft()
            self.running.append(handle)
            try:
                ended = agent.post(handle, self.name)
            except TransportError as exc:
                self._ended_badly(handle, exc)
            else:
                if ended:
                    self._ended_well(agent, handle)
        if self.status.state is not State.PENDING:
            _release(agent, [*self.waiting])
            self.waiting.clear()

    def _ended_well(self, agent: Agent, handle: Handle) -> None:
        self.running.remove(handle)
        if self.timed is not None:
            with contextlib.suppress(TransportError):
                self.timed.append(agent.telemetry(handle))
        with contextlib.suppress(TransportError):
            agent.release(handle)

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


def _release(agent: Agent, handles: list[Handle]) -> list[TransportError]:
    failed = []
    for handle in handles:
        try:
            agent.release(handle)
        except TransportError as exc:
            failed.append(exc)
    return failed
