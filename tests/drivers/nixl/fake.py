"""An agent without NIXL: it remembers what it was asked, and fails as it is told."""

from __future__ import annotations

import itertools

from kvferry.core.errors import TransportError
from kvferry.core.memory import Region
from kvferry.drivers.nixl.agent import Agent, Handle, Registration, Telemetry, TransferChunk


class FakeAgent(Agent):
    """What tests look at and set.

    Attributes:
        registered: the ranges that are registered, by registration.
        refused: ranges that ``register`` refuses.
        answers: what ``post`` and then each ``check`` of a part does: ended, or not, or an error.
        posted: the parts.
        gone: what ``prepare`` raises.
        held: the handles that were not released.
        sent: notifications.
        must_not_post: as ``Agent`` has it.
        known: the metadata that it has got, and not been told to forget.
        closed: whether it has been.
    """

    must_not_post = False

    def __init__(self, name: str = "fake") -> None:
        self.name = name
        self.known: list[bytes] = []
        self.closed = False
        self.memory = frozenset({"cpu", "cuda"})
        self.notifies = True
        self.registered: dict[Registration, Region] = {}
        self.refused: set[Region] = set()
        self.answers: dict[object, list[bool | TransportError]] = {}
        self.posted: list[object] = []
        self.gone: TransportError | None = None
        self.held: set[Handle] = set()
        self.sent: list[tuple[str, bytes]] = []
        self._ids = itertools.count(1)

    def register(self, region: Region) -> Registration:
        if region in self.refused:
            raise TransportError(f"told to refuse {region}")
        registration = Registration(next(self._ids))
        self.registered[registration] = region
        return registration

    def deregister(self, registration: Registration) -> None:
        del self.registered[registration]

    def add(self, metadata: bytes) -> str:
        self.known.append(metadata)
        return metadata.decode()

    def remove(self, name: str) -> bool:
        self.known = [one for one in self.known if one != name.encode()]
        return True

    def close(self, *, quiet: bool) -> None:
        self.closed = True

    def prepare(self, part: TransferChunk, name: str = "peer") -> Handle:
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

    def telemetry(self, handle: Handle) -> Telemetry:
        return Telemetry(nbytes=1, descriptors=1, post_seconds=0.0, seconds=0.0)

    def notify(self, name: str, payload: bytes) -> None:
        self.sent.append((name, payload))

    def _answer(self, handle: Handle) -> bool:
        answers = self.answers.get(handle.native, [])
        answer = answers.pop(0) if answers else True
        if isinstance(answer, TransportError):
            raise answer
        return answer
