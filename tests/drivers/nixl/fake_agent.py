"""An agent without NIXL that records calls and fails on request."""

from __future__ import annotations

import itertools

from kvferry.core.errors import TransportError
from kvferry.core.memory import Region
from kvferry.drivers.nixl.agent import Agent, Handle, Registration, TransferChunk
from kvferry.drivers.nixl.descriptor_lists import PagedChunk


class FakeAgent(Agent):
    """An agent that records calls and fails on request."""

    must_not_post = False

    def __init__(self, name: str = "fake") -> None:
        self.name = name
        self.known: list[bytes] = []  # metadata that was added and not removed
        self.refuses_metadata = False
        self.closed = False
        self.memory = frozenset({"cpu", "cuda"})
        self.notifies = True
        self.registered: dict[Registration, Region] = {}
        self.refused: set[Region] = set()
        # For each chunk, what ``post`` and then each ``check`` returns (whether the chunk has
        # ended) or raises. By default, a chunk ends when it is posted.
        self.answers: dict[object, list[bool | TransportError]] = {}
        self.posted: list[object] = []
        self.gone: TransportError | None = None  # what ``prepare`` raises
        self.held: set[Handle] = set()  # that were not released
        self.sent: list[tuple[str, bytes]] = []
        self._ids = itertools.count(1)

    def register(self, region: Region) -> Registration:
        if region in self.refused:
            raise TransportError(f"told to refuse {region}")
        registration = Registration(next(self._ids))
        self.registered[registration] = region
        return registration

    def deregister(self, registration: Registration) -> None:
        if self.registered[registration] in self.refused:
            raise TransportError(f"told to refuse {self.registered[registration]}")
        del self.registered[registration]

    def add(self, metadata: bytes) -> str:
        self.known.append(metadata)
        if self.refuses_metadata:  # NIXL keeps a part of it
            raise TransportError("its second half is wrong")
        return metadata.decode()

    def remove(self, name: str) -> None:
        self.known = [one for one in self.known if one != name.encode()]

    def close(self, *, quiet: bool) -> None:
        self.closed = True

    def prepare(self, part: TransferChunk | PagedChunk, name: str = "peer") -> Handle:
        if self.gone is not None:
            raise self.gone
        made = Handle(agent=self, native=part, name=name)
        self.held.add(made)
        return made

    def post(self, handle: Handle) -> bool:
        self.posted.append(handle.native)
        return self._answer(handle)

    def check(self, handle: Handle) -> bool:
        return self._answer(handle)

    def release(self, handle: Handle) -> None:
        self.held.remove(handle)

    def notify(self, name: str, payload: bytes) -> None:
        self.sent.append((name, payload))

    def _answer(self, handle: Handle) -> bool:
        answers = self.answers.get(handle.native, [])
        answer = answers.pop(0) if answers else True
        if isinstance(answer, TransportError):
            raise answer
        return answer
