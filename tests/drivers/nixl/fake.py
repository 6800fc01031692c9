"""An agent without NIXL: it remembers what it was asked, and fails as it is told."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np

from kvferry.core.errors import TransportError
from kvferry.core.memory import Region
from kvferry.drivers.nixl.agent import Agent, Handle, Registration, Rows, Telemetry


class FakeAgent(Agent):
    """What tests look at and set.

    Attributes:
        registered: the ranges that are registered, by registration.
        refused: ranges that ``register`` refuses.
        answers: what ``post`` and then each ``check`` of a handle does: ended, or not, or an error.
        posted: the handles.
        prepared: the kinds and rows of each handle.
        held: the handles that were not released.
        sent: notifications.
    """

    def __init__(self) -> None:
        self.name = "fake"
        self.memory = frozenset({"cpu", "cuda"})
        self.notifies = True
        self.registered: dict[Registration, Region] = {}
        self.refused: set[Region] = set()
        self.answers: dict[Handle, list[bool | TransportError]] = defaultdict(list)
        self.posted: list[Handle] = []
        self.prepared: dict[Handle, tuple[tuple[str, str], Rows, Rows]] = {}
        self.held: set[Handle] = set()
        self.sent: list[tuple[str, bytes]] = []
        self._few_rows, self._failed = None, False
        self._ids = itertools.count(1)

    def register(self, region: Region) -> Registration:
        if region in self.refused:
            raise TransportError(f"told to refuse {region}")
        registration = Registration(next(self._ids))
        self.registered[registration] = region
        return registration

    def deregister(self, registration: Registration) -> None:
        del self.registered[registration]

    def handle(self) -> Handle:
        """A handle, as ``prepare`` would have made it."""
        made = Handle(next(self._ids))
        self.held.add(made)
        return made

    def prepare(
        self, *, write: bool, kinds: tuple[str, str], local: Rows, remote: Rows, name: str
    ) -> Handle:
        made = self.handle()
        self.prepared[made] = (kinds, np.array(local), np.array(remote))
        return made

    def post(self, handle: Handle, name: str) -> bool:
        self.posted.append(handle)
        return self._answer(handle)

    def check(self, handle: Handle, name: str) -> bool:
        return self._answer(handle)

    def release(self, handle: Handle) -> None:
        self.held.remove(handle)

    def telemetry(self, handle: Handle) -> Telemetry:
        return Telemetry(nbytes=1, descriptors=1, post_seconds=0.0, seconds=0.0)

    def notify(self, name: str, payload: bytes) -> None:
        self.sent.append((name, payload))

    def _answer(self, handle: Handle) -> bool:
        answer = self.answers[handle].pop(0) if self.answers[handle] else True
        if isinstance(answer, TransportError):
            raise answer
        return answer
