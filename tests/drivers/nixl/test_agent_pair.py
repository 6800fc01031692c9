"""After the first failed transfer, a second agent has the same registrations and peers."""

from __future__ import annotations

import pytest

from kvferry.core.errors import DriverError, PeerLostError, TransportError
from kvferry.core.memory import Region
from kvferry.drivers.nixl import agent_pair as agents
from kvferry.drivers.nixl.agent import TransferChunk
from kvferry.drivers.nixl.agent_pair import AgentPair
from kvferry.drivers.nixl.library import NixlLibrary
from kvferry.drivers.nixl.options import NixlOptions
from kvferry.drivers.nixl.peer import NixlPeer
from tests.drivers.nixl.fake_agent import FakeAgent

LIBRARY = NixlLibrary(
    package="fake", version="0", api=None, errors=(), lost=OSError, unknown=KeyError
)
CHUNK = TransferChunk(local=None, remote=None)
ONE, OTHER = Region(address=4096, nbytes=64), Region(address=8192, nbytes=64)


class FakeAgentFactory:
    """Makes ``FakeAgent`` instances, which refuse some ranges, or raises an error."""

    def __init__(self) -> None:
        self.made: list[FakeAgent] = []
        self.refused: set[Region] = set()
        self.error: DriverError | None = None

    def __call__(self, library: NixlLibrary, name: str, options: NixlOptions) -> FakeAgent:
        if self.error is not None:
            raise self.error
        self.made.append(FakeAgent(name))
        self.made[-1].refused = set(self.refused)
        return self.made[-1]


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> FakeAgentFactory:
    made = FakeAgentFactory()
    monkeypatch.setattr(agents, "Agent", made)
    return made


def _peer() -> NixlPeer:
    return NixlPeer(name="peer", itself=False, metadata=b"peer", keys=frozenset({1}))


def _pair_after_failure(
    factory: FakeAgentFactory,
) -> tuple[AgentPair, FakeAgent, FakeAgent, NixlPeer]:
    """Return a pair after a failed transfer, its two agents, and a peer; ``ONE`` is registered."""
    pair, peer = AgentPair(LIBRARY, "ours", NixlOptions()), _peer()
    [first] = factory.made
    pair.registrations.add(ONE, ())
    peer.load_metadata(pair.first)
    first.must_not_post = True
    pair.prepare(peer, CHUNK)
    [_, second] = factory.made
    return pair, first, second, peer


def test_first_agent_posts_until_it_must_not(factory: FakeAgentFactory) -> None:
    pair, peer = AgentPair(LIBRARY, "ours", NixlOptions()), _peer()
    assert pair.prepare(peer, CHUNK).agent is pair.first
    factory.made[0].must_not_post = True
    posting = [pair.prepare(peer, CHUNK).agent for _ in range(3)]
    assert posting == [factory.made[1]] * 3
    assert factory.made[1].name != "ours"


def test_second_agent_is_not_made_without_enough_file_descriptors(
    factory: FakeAgentFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = AgentPair(LIBRARY, "ours", NixlOptions())
    factory.made[0].must_not_post = True
    with monkeypatch.context() as short:
        short.setattr("resource.getrlimit", lambda _: (20, 20))
        with pytest.raises(TransportError, match=r"of which -?\d+ of 20 are free: raise the limit"):
            pair.prepare(_peer(), CHUNK)
    assert pair.prepare(_peer(), CHUNK).agent is factory.made[1]


def test_second_agent_has_same_registrations_and_peers(factory: FakeAgentFactory) -> None:
    pair, first, second, peer = _pair_after_failure(factory)
    pair.registrations.add(OTHER, ())
    for agent in (first, second):
        assert sorted(one.address for one in agent.registered.values()) == [4096, 8192]
        assert agent.known == [b"peer"]
    pair.registrations.remove(OTHER)
    assert list(second.registered.values()) == list(first.registered.values()) == [ONE]
    peer.remove_remote()
    assert first.known == second.known == []
    pair.close(quiet=True)
    assert first.closed
    assert second.closed


def test_second_agent_loads_metadata_only_when_it_changed(factory: FakeAgentFactory) -> None:
    pair, first, second, peer = _pair_after_failure(factory)
    pair.prepare(peer, CHUNK)
    assert second.known == [b"peer"]
    peer.keys = frozenset({1, 2})
    pair.prepare(peer, CHUNK)
    assert second.known == [b"peer", b"peer"]
    assert first.known == [b"peer"]


def test_second_agent_is_its_own_peer(factory: FakeAgentFactory) -> None:
    pair, _, second, _ = _pair_after_failure(factory)
    handle = pair.prepare(NixlPeer(name="ours", itself=True), CHUNK)
    assert handle.name == second.name


def test_lost_peer_makes_no_second_agent(factory: FakeAgentFactory) -> None:
    pair, peer = AgentPair(LIBRARY, "ours", NixlOptions()), _peer()
    factory.made[0].must_not_post = peer.lost = True
    with pytest.raises(PeerLostError, match="connect again"):
        pair.prepare(peer, CHUNK)
    assert len(factory.made) == 1


def test_failed_second_agent_is_closed_and_made_again_by_next_transfer(
    factory: FakeAgentFactory,
) -> None:
    pair, peer = AgentPair(LIBRARY, "ours", NixlOptions()), _peer()
    pair.registrations.add(ONE, ())
    pair.registrations.add(OTHER, ())
    factory.made[0].must_not_post = True
    factory.error = DriverError("too many open files")
    with pytest.raises(TransportError, match="too many open files"):
        pair.prepare(peer, CHUNK)
    factory.error = None
    factory.refused = {OTHER}
    with pytest.raises(TransportError, match="told to refuse"):
        pair.prepare(peer, CHUNK)
    assert factory.made[1].closed
    assert not factory.made[1].registered
    factory.refused = set()
    assert pair.prepare(peer, CHUNK).agent is factory.made[2]
    assert len(factory.made[2].registered) == 2


def test_region_refused_by_one_agent_is_registered_with_none(factory: FakeAgentFactory) -> None:
    pair, first, second, _ = _pair_after_failure(factory)
    second.refused = {OTHER}
    with pytest.raises(TransportError, match="told to refuse"):
        pair.registrations.add(OTHER, ())
    assert list(first.registered.values()) == [ONE]
