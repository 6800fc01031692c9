"""What becomes of a load when its producer is killed, stopped, started again, or pestered.

Whatever it is, and whenever: the load has its own bytes or has failed, it is reported once, no page
stays held, and the next load works.
"""

from __future__ import annotations

import random
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.ticket import Ticket
from tests.core.endpoint.engines import Engine, engine, eventually
from tests.faults.stages import (
    OPTIONS,
    SHAPE,
    Cell,
    Remote,
    Staged,
    produce,
    remote,
    right,
    shaking,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

STAGES = ["before the handshake", "during the handshake", "reading", "fencing", "afterwards"]
FAULTS = {
    "killed": {"before the handshake", "during the handshake", "reading", "fencing"},
    "stopped": set[str](),
    "restarted": {"before the handshake", "during the handshake", "reading", "fencing"},
    "garbage": set[str](),
}
"""What happens, and the stages at which a load cannot come through it."""
LOCAL = [3, 4]


class Bench:
    """A producer to which things happen, and a decode engine here."""

    def __init__(self, decode: Engine, driver: Staged, stack: ExitStack) -> None:
        self.decode, self.driver = decode, driver
        self._stack = stack
        self.prefill: Remote
        self.port = self.start(0)
        self.reported: Counter[RequestId] = Counter()

    def start(self, port: int) -> int:
        self.prefill = self._stack.enter_context(remote(produce, port))
        return int(self.prefill.answer())

    def happen(self, fault: str) -> None:
        if fault == "killed":
            self.prefill.kill()
        elif fault == "stopped":
            self.prefill.signal(signal.SIGSTOP)
        elif fault == "restarted":
            self.prefill.kill()
            self.start(self.port)
        else:
            pester(self.port)

    def mend(self, fault: str) -> None:
        if fault == "killed":
            self.start(self.port)
        elif fault == "stopped":
            self.prefill.signal(signal.SIGCONT)

    def load(self, request: str, ticket: Ticket) -> str:
        """Load, and say how that ended; bytes that are not the ticket's are no success."""
        self.begin(request, ticket)
        return self.outcome(request)

    def begin(self, request: str, ticket: Ticket) -> None:
        for rank in self.decode.ranks:
            rank.cache[:, LOCAL] = -1.0
        self.decode.pull(request, ticket, LOCAL)

    def outcome(self, request: str) -> str:
        error: KVFerryError | None = None
        endpoint = self.decode.ranks[0].endpoint

        def over() -> bool:
            nonlocal error
            results = endpoint.results()
            self.reported.update(results.received)
            error = results.failed.get(RequestId(request), error)
            return self.reported[RequestId(request)] > 0

        eventually(over, f"{request} is reported", seconds=60.0)
        assert error is not None or right(self.decode, LOCAL), "bytes of something else"
        return "loaded" if error is None else type(error).__name__


@contextmanager
def bench() -> Iterator[Bench]:
    driver = Staged()
    with (
        ExitStack() as stack,
        engine("decode", SHAPE, options=OPTIONS, transport=lambda: driver) as decode,
    ):
        yield Bench(decode, driver, stack)


def pester(port: int) -> None:
    """Strangers at the side channel."""
    noise = random.Random(port)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(noise.randbytes(noise.randrange(1, 2000)))


def through(world: Bench, fault: str, stage: str) -> str:
    """Let the fault happen at that stage of a load; how the load ended."""
    ticket = world.prefill.ask("serve", "p-1")
    if stage == "before the handshake":
        world.happen(fault)
        if fault != "stopped":
            return world.load("d-1", ticket)
    if stage in ("before the handshake", "during the handshake"):
        world.prefill.signal(signal.SIGSTOP)
        world.begin("d-1", ticket)
        eventually(shaking, "the handshake is under way")
        if fault in ("killed", "restarted"):
            world.happen(fault)
        else:
            world.prefill.signal(signal.SIGCONT)
            if fault == "garbage":
                world.happen(fault)
        return world.outcome("d-1")
    if stage == "afterwards":
        outcome = world.load("d-1", ticket)
        world.happen(fault)
        return outcome
    world.driver.at[stage] = lambda: world.happen(fault)
    return world.load("d-1", ticket)


@pytest.mark.parametrize("fault", ["killed", "stopped", "restarted"])
def test_a_fault_while_pages_are_computed(fault: str) -> None:
    """No transfer fails of a process that is stopped: only its side channel tells."""
    cell = Cell(side="producer", fault=fault, stage="computing")
    with bench() as world:
        world.begin("d-1", world.prefill.ask("promise", "p-1"))
        eventually(lambda: world.driver.words > 3, "the pages are asked for again and again")
        world.happen(fault)
        outcome = world.outcome("d-1")
        assert outcome == "PeerLostError"
        cell.write(outcome)
        world.mend(fault)
        if fault == "stopped":
            world.prefill.ask("reset")
        if world.load("d-2", world.prefill.ask("serve", "p-2")) != "loaded":
            assert world.load("d-3", world.prefill.ask("serve", "p-3")) == "loaded"
        eventually(lambda: world.prefill.ask("held") == 0, "no page is held any more")
        assert set(world.reported.values()) == {1}, world.reported


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_producer(fault: str, stage: str) -> None:
    cell = Cell(side="producer", fault=fault, stage=stage)
    with bench() as world:
        outcome = through(world, fault, stage)
        assert (outcome != "loaded") is (stage in FAULTS[fault]), outcome
        cell.write(outcome)
        world.mend(fault)
        late = world.prefill.ask("serve", "p-2")
        # A producer that has just come back may still be taken for dead, once.
        if world.load("d-2", late) != "loaded":
            assert world.load("d-3", world.prefill.ask("serve", "p-3")) == "loaded"
        eventually(lambda: world.prefill.ask("held") == 0, "no page is held any more")
        assert set(world.reported.values()) == {1}, world.reported
        assert world.decode.ranks[0].endpoint.healthy
        assert world.decode.ranks[0].endpoint.pending == 0
