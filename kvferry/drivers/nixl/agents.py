"""A transport's agents, and the memory that is registered with all of them.

**Agents.** Once a transfer has failed, an agent whose backend has threads of its own must not post
any more (docs/adr/0020). From then on a second agent, without such threads and unknown to peers,
posts all transfers. It is made when it is first needed.

**Memory.** Regions may lie within others; the *spans* registered for them never overlap. NIXL
bisects its registrations for an address, which fails if one lies within another. So a region within
a span is one more user of that span, and one that overlaps a span otherwise is refused.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from kvferry.core.errors import ConnectError, DriverError, PeerLostError, TransportError
from kvferry.core.memory import Region
from kvferry.drivers.nixl.agent import Agent, Handle, Registration, TransferChunk
from kvferry.drivers.nixl.descriptor_lists import PagedChunk
from kvferry.drivers.nixl.library import NixlLibrary
from kvferry.drivers.nixl.options import NixlOptions, without_threads
from kvferry.drivers.nixl.peer import NixlPeer

_FAILED_BEFORE = "a transfer has failed before"

_FILES = 64
"""How many file descriptors must be free to make the second agent: three times what it needs."""


@dataclass(slots=True, kw_only=True, eq=False)
class RegisteredSpan:
    """A range of memory that is registered with NIXL, for one or more regions."""

    whole: Region
    key: int  # new for each registration, by which peers notice
    users: int = 0  # how many regions
    held: dict[Agent, Registration] = field(default_factory=dict)  # by agent


class Agents:
    """The agents of one transport, one or two, with its registered memory.

    Methods raise ``TransportError`` if NIXL refuses.
    """

    def __init__(self, library: NixlLibrary, name: str, options: NixlOptions) -> None:
        # The agent through which peers reach memory. It carries all notifications, and posts all
        # transfers until its ``must_not_post`` is true.
        self.first = Agent(library, name, options)
        self._all = [self.first]
        self._library = library
        self._options = without_threads(options)
        self.spans: list[RegisteredSpan] = []
        self._keys = itertools.count(1)
        # Held because ``connect`` and ``disconnect`` may run at the same time as other calls.
        self._lock = threading.Lock()

    def register(self, region: Region) -> RegisteredSpan:
        """Register a region; return the span that contains it, which may be a new one."""
        with self._lock:
            span = next((span for span in self.spans if _overlap(span.whole, region)), None)
            if span is None:
                span = RegisteredSpan(whole=region, key=next(self._keys))
                _register([span], self._all)
                self.spans.append(span)
            elif not span.whole.contains(region):
                raise TransportError(
                    f"{region} overlaps {span.whole}, which is registered, and reaches beyond it: "
                    "register the larger region first"
                )
            span.users += 1
            return span

    def deregister(self, span: RegisteredSpan) -> None:
        """Deregister one of a span's regions, and the span with the last."""
        with self._lock:
            span.users -= 1
            if not span.users:
                self.spans.remove(span)
                _deregister([span], self._all)

    def prepare(self, peer: NixlPeer, chunk: TransferChunk | PagedChunk) -> Handle:
        """Make a NIXL transfer for a chunk, in the agent that posts transfers now.

        Raise ``PeerLostError`` if it cannot load the peer's metadata, or as ``Agent.prepare``.
        """
        if peer.lost:
            raise PeerLostError(f"the connection to {peer.name} is broken: connect again")
        agent = self.first if not self.first.must_not_post else self._second()
        try:
            peer.load_metadata(agent)
        except ConnectError as exc:
            raise PeerLostError(str(exc)) from exc
        name = agent.name if peer.itself else peer.name
        if isinstance(chunk, PagedChunk):
            return peer.prepared.prepare(agent, chunk, name)
        return agent.prepare(chunk, name)

    def wait_idle(self, deadline: float) -> bool:
        """As ``Agent.wait_idle``, for both agents."""
        return all(agent.wait_idle(deadline) for agent in self._all)

    def close(self, *, quiet: bool) -> None:
        """Deregister all memory, as far as NIXL does it, and close both agents."""
        with contextlib.suppress(TransportError):
            _deregister(self.spans, self._all)
        for agent in self._all:
            agent.close(quiet=quiet)

    def _second(self) -> Agent:
        with self._lock:
            if len(self._all) == 1:
                self._all.append(self._make_second())
            return self._all[-1]

    def _make_second(self) -> Agent:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = most - len(os.listdir("/proc/self/fd"))
        if free < _FILES:  # UCX would abort the process
            raise TransportError(
                f"{_FAILED_BEFORE}, and to post another takes up to {_FILES} file descriptors, of "
                f"which {free} of {most} are free: raise the limit (ulimit -n), or restart the "
                "engine"
            )
        try:
            made = Agent(self._library, f"{self.first.name}-2", self._options)
        except (DriverError, *self._library.errors) as exc:  # type: ignore[misc]
            exc.__traceback__ = None  # its frames would keep the agent alive
            raise TransportError(f"{_FAILED_BEFORE}, and since then: {exc}") from exc
        try:
            _register(self.spans, [made])
        except TransportError:
            made.close(quiet=True)
            raise
        return made


def _register(spans: Iterable[RegisteredSpan], agents: Collection[Agent]) -> None:
    """Register spans with agents, all of them or none."""
    spans = list(spans)
    try:
        for span in spans:
            for agent in agents:
                span.held[agent] = agent.register(span.whole)
    except TransportError:
        with contextlib.suppress(TransportError):
            _deregister(spans, agents)
        raise


def _deregister(spans: Iterable[RegisteredSpan], agents: Collection[Agent]) -> None:
    """Deregister spans from agents, then raise ``TransportError`` if one was refused."""
    refused: TransportError | None = None
    for span in spans:
        for agent in agents:
            if (registration := span.held.pop(agent, None)) is not None:
                try:
                    agent.deregister(registration)
                except TransportError as exc:
                    refused = exc
    if refused is not None:
        raise refused


def _overlap(one: Region, other: Region) -> bool:
    same = (one.kind, one.device) == (other.kind, other.device)
    return same and one.address < other.end and other.address < one.end
