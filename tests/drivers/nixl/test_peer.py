"""Peers: loading their metadata into NIXL, which keeps it after they were disconnected."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvferry.core.errors import ConnectError
from kvferry.drivers.nixl.peer import MAX_IDLE, IdlePeers, NixlPeer
from tests.drivers.nixl.fake_agent import FakeAgent


def peer(name: str, *keys: int) -> NixlPeer:
    return NixlPeer(name=name, itself=False, metadata=name.encode(), keys=frozenset(keys))


def test_metadata_under_another_name_removes_no_agent() -> None:
    agent = FakeAgent()
    honest = peer("honest", 1)
    honest.load_metadata(agent)
    with pytest.raises(ConnectError, match="an address of other that holds NIXL's metadata of"):
        replace(honest, name="other", loaded={}).load_metadata(agent)
    assert b"honest" in agent.known


def test_refused_peer_is_removed_unless_it_was_known() -> None:
    """Transfers from a known one may be under way: the caller decides what happens to it."""
    agent = FakeAgent()
    agent.refuses_metadata = True
    some = peer("one", 1)
    for known in ([], [b"one"]):
        with pytest.raises(ConnectError, match="its second half is wrong"):
            some.load_metadata(agent)
        assert agent.known == known
        some.loaded[agent] = frozenset()


@pytest.mark.parametrize(
    ("keys", "loads"), [((1, 2, 3), 2), ((2, 3), 1)], ids=["more memory", "other memory"]
)
def test_returning_peer_is_removed_first_only_if_memory_is_gone(
    keys: tuple[int, ...], loads: int
) -> None:
    """NIXL adds memory to a known peer, but removes none."""
    idle, agent, second = IdlePeers(), FakeAgent(), FakeAgent()
    first = peer("a", 1, 2)
    idle.connect(first, agent)
    first.load_metadata(second)
    idle.add(first)
    again = peer("a", *keys)
    idle.connect(again, agent)
    assert agent.known == [b"a"] * loads
    idle.add(again)
    agent.refuses_metadata = True
    with pytest.raises(ConnectError, match="its second half is wrong"):
        idle.connect(peer("a", *keys), agent)
    assert (agent.known, second.known) == ([], [])


def test_only_most_recent_idle_peers_are_kept() -> None:
    idle, agent = IdlePeers(), FakeAgent()
    for number in range(MAX_IDLE + 2):
        some = peer(str(number), 1)
        idle.connect(some, agent)
        idle.add(some)
    assert (len(agent.known), agent.known[0]) == (MAX_IDLE, b"2")
    idle.clear()
    assert agent.known == []


def test_concurrently_connected_peer_is_never_removed() -> None:
    """Many threads connect more peers than are kept idle."""
    idle, agent = IdlePeers(), FakeAgent()

    def connect_repeatedly(seed: int) -> bool:
        known = True
        for turn in range(200):
            some = peer(f"{seed}-{(seed * turn) % 20}", 1)
            idle.connect(some, agent)
            known = known and some.metadata in agent.known
            idle.add(some)
        return known

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(connect_repeatedly, range(1, 9)))
