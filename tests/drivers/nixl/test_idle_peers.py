"""Peers that NIXL goes on knowing after they were disconnected."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.core.errors import ConnectError, TransportError
from kvferry.drivers.nixl.idle_peers import MAX_IDLE, IdlePeers
from kvferry.drivers.nixl.peer import NixlPeer
from tests.drivers.nixl.fake import FakeAgent


def peer(name: str, *keys: int) -> NixlPeer:
    """One with some spans."""
    return NixlPeer(name=name, itself=False, metadata=name.encode(), keys=frozenset(keys))


def visit(idle: IdlePeers, agent: FakeAgent, some: NixlPeer) -> None:
    """Meet it and part from it."""
    idle.connect(some, agent)
    idle.add(some)


def test_one_that_comes_back_is_told_again_and_not_forgotten_before() -> None:
    idle, agent = IdlePeers(), FakeAgent()
    visit(idle, agent, peer("a", 1))
    again = peer("a", 1, 2)
    idle.connect(again, agent)
    assert agent.known == [b"a", b"a"]
    again.remove_remote()
    assert agent.known == []


def test_one_that_comes_back_without_some_of_its_memory_is_forgotten_before() -> None:
    idle, agent = IdlePeers(), FakeAgent()
    visit(idle, agent, peer("a", 1, 2))
    idle.connect(peer("a", 2, 3), agent)
    assert agent.known == [b"a"]


def test_another_agent_that_knows_it_forgets_it_with_the_first() -> None:
    idle, agent, second = IdlePeers(), FakeAgent(), FakeAgent()
    first = peer("a", 1)
    idle.connect(first, agent)
    first.load_metadata(second)
    idle.add(first)
    again = peer("a", 1)
    idle.connect(again, agent)
    again.remove_remote()
    assert (agent.known, second.known) == ([], [])


def test_only_the_last_few_are_kept() -> None:
    idle, agent = IdlePeers(), FakeAgent()
    for number in range(MAX_IDLE + 2):
        visit(idle, agent, peer(str(number), 1))
    assert len(agent.known) == MAX_IDLE
    assert agent.known[0] == b"2"
    idle.clear()
    assert agent.known == []


def test_one_that_nixl_does_not_take_is_known_to_nobody() -> None:
    class Refusing(FakeAgent):
        refuses = False

        def add(self, metadata: bytes) -> str:
            if self.refuses:
                raise TransportError("no")
            return super().add(metadata)

    idle, agent = IdlePeers(), Refusing()
    visit(idle, agent, peer("a", 1))
    agent.refuses = True
    with pytest.raises(ConnectError, match="no"):
        idle.connect(peer("a", 1), agent)
    assert agent.known == []


def test_whoever_is_met_is_known_though_others_are_forgotten_meanwhile() -> None:
    """From many threads, of more peers than are kept."""
    idle, agent = IdlePeers(), FakeAgent()

    def visits(seed: int) -> bool:
        known = True
        for turn in range(200):
            some = peer(f"{seed}-{(seed * turn) % 20}", 1)
            idle.connect(some, agent)
            known = known and some.metadata in agent.known
            idle.add(some)
        return known

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(visits, range(1, 9)))
