"""Peers that NIXL goes on knowing after they were disconnected."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.core.errors import ConnectError, TransportError
from kvferry.drivers.nixl.idle_peers import MAX_PARKED, IdlePeers
from kvferry.drivers.nixl.peer import NixlPeer
from tests.drivers.nixl.fake import FakeAgent


def peer(name: str, *keys: int) -> NixlPeer:
    """One with some spans."""
    return NixlPeer(name=name, itself=False, metadata=name.encode(), keys=frozenset(keys))


def visit(parked: IdlePeers, agent: FakeAgent, some: NixlPeer) -> None:
    """Meet it and part from it."""
    parked.meet(some, agent)
    parked.park(some)


def test_one_that_comes_back_is_told_again_and_not_forgotten_before() -> None:
    parked, agent = IdlePeers(), FakeAgent()
    visit(parked, agent, peer("a", 1))
    again = peer("a", 1, 2)
    parked.meet(again, agent)
    assert agent.known == [b"a", b"a"]
    again.part()
    assert agent.known == []


def test_one_that_comes_back_without_some_of_its_memory_is_forgotten_before() -> None:
    parked, agent = IdlePeers(), FakeAgent()
    visit(parked, agent, peer("a", 1, 2))
    parked.meet(peer("a", 2, 3), agent)
    assert agent.known == [b"a"]


def test_another_agent_that_knows_it_forgets_it_with_the_first() -> None:
    parked, agent, second = IdlePeers(), FakeAgent(), FakeAgent()
    first = peer("a", 1)
    parked.meet(first, agent)
    first.tell(second)
    parked.park(first)
    again = peer("a", 1)
    parked.meet(again, agent)
    again.part()
    assert (agent.known, second.known) == ([], [])


def test_only_the_last_few_are_kept() -> None:
    parked, agent = IdlePeers(), FakeAgent()
    for number in range(MAX_PARKED + 2):
        visit(parked, agent, peer(str(number), 1))
    assert len(agent.known) == MAX_PARKED
    assert agent.known[0] == b"2"
    parked.clear()
    assert agent.known == []


def test_one_that_nixl_does_not_take_is_known_to_nobody() -> None:
    class Refusing(FakeAgent):
        refuses = False

        def add(self, metadata: bytes) -> str:
            if self.refuses:
                raise TransportError("no")
            return super().add(metadata)

    parked, agent = IdlePeers(), Refusing()
    visit(parked, agent, peer("a", 1))
    agent.refuses = True
    with pytest.raises(ConnectError, match="no"):
        parked.meet(peer("a", 1), agent)
    assert agent.known == []


def test_whoever_is_met_is_known_though_others_are_forgotten_meanwhile() -> None:
    """From many threads, of more peers than are kept."""
    parked, agent = IdlePeers(), FakeAgent()

    def visits(seed: int) -> bool:
        known = True
        for turn in range(200):
            some = peer(f"{seed}-{(seed * turn) % 20}", 1)
            parked.meet(some, agent)
            known = known and some.metadata in agent.known
            parked.park(some)
        return known

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(visits, range(1, 9)))
