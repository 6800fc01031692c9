"""A transport's agents: the one that peers know, and one that posts in its place after a failure.

Once a transfer has failed, an agent whose backend has threads of its own must not post any more
(docs/adr/0020). From then on a second agent, without such threads and unknown to peers, posts all
transfers. It is made when it is first needed.
"""

from __future__ import annotations

import os
import resource
import threading

from kvferry.core.errors import ConnectError, DriverError, PeerLostError, TransportError
from kvferry.drivers.nixl.agent import Agent, Handle, TransferChunk, bare
from kvferry.drivers.nixl.descriptor_lists import PagedChunk
from kvferry.drivers.nixl.library import NixlLibrary
from kvferry.drivers.nixl.options import NixlOptions, without_threads
from kvferry.drivers.nixl.peer import NixlPeer
from kvferry.drivers.nixl.registrations import Registrations

_FAILED_BEFORE = "a transfer has failed before"

_FILES = 64
"""How many file descriptors must be free to make the second agent: three times what it needs."""


class AgentPair:
    """The agents of one transport, and the memory that is registered with all of them."""

    def __init__(self, library: NixlLibrary, name: str, options: NixlOptions) -> None:
        # The agent through which peers reach memory. It carries all notifications, and posts all
        # transfers until its ``must_not_post`` is true.
        self.first = Agent(library, name, options)
        self.registrations = Registrations(self.first)
        self._agents = self.registrations.agents  # one, or two
        self._library = library
        self._options = without_threads(options)
        # Held because ``connect`` and ``disconnect`` may run at the same time as other calls.
        self._lock = threading.Lock()

    def prepare(self, peer: NixlPeer, chunk: TransferChunk | PagedChunk) -> Handle:
        """Make a NIXL transfer for a chunk, in the agent that posts transfers now.

        Raise ``PeerLostError`` if it cannot load the peer's metadata, or as ``Agent.prepare``.
        """
        if peer.lost:
            raise PeerLostError(f"the connection to {peer.name} is broken: connect again")
        agent = self._posting()
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
        return all(agent.wait_idle(deadline) for agent in self._agents)

    def close(self, *, quiet: bool) -> None:
        """Deregister all memory, then close both agents, as ``Agent.close``."""
        self.registrations.clear()
        for agent in self._agents:
            agent.close(quiet=quiet)

    def _posting(self) -> Agent:
        if not self.first.must_not_post:
            return self.first
        with self._lock:
            if len(self._agents) == 1:
                self._make_second()
            return self._agents[-1]

    def _make_second(self) -> None:
        _check_files()
        try:
            made = Agent(self._library, f"{self.first.name}-2", self._options)
        except DriverError as exc:
            raise TransportError(f"{_FAILED_BEFORE}, and since then: {exc}") from exc
        except self._library.errors as exc:
            raise TransportError(f"{_FAILED_BEFORE}, and since then: {exc}") from bare(exc)
        try:
            self.registrations.join(made)
        except TransportError:
            made.close(quiet=True)
            raise


def _check_files() -> None:
    """Refuse to make an agent if too few files are free: UCX would abort the process."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = most - len(os.listdir("/proc/self/fd"))
    if free < _FILES:
        raise TransportError(
            f"{_FAILED_BEFORE}, and to post another takes up to {_FILES} file descriptors, of "
            f"which {free} of {most} are free: raise the limit (ulimit -n), or restart the engine"
        )
