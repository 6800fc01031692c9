"""A second agent, from the first failed transfer on: with the same memory and the same peers."""

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
from tests.drivers.nixl.fake import FakeAgent

LIBRARY = NixlLibrary(
    package="fake", version="0", api=None, errors=(), lost=OSError, unknown=KeyError
)
PART = TransferChunk(write=False, local=None, remote=None)
ONE, OTHER = Region(address=4096, nbytes=64), Region(address=8192, nbytes=64)


class Maker:
    """Makes agents of no NIXL.

    Attributes:
        made: those, in order.
        refused: what the next ones will not register.
        error: raised instead of making one.
    """

    def __init__(self) -> None:
        self.made: list[FakeAgent] = []
        self.refused: set[Region] = set()
        self.error: DriverError | None = None

    def __call__(self, library: NixlLibrary, name: str, options: NixlOptions) -> FakeAgent:
        if self.error is not None:
            raise self.error
        agent = FakeAgent(name)
        agent.refused = set(self.refused)
        self.made.append(agent)
        return agent


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Maker:
    made = Maker()
    monkeypatch.setattr(agents, "Agent", made)
    return made


def _peer() -> NixlPeer:
    return NixlPeer(name="peer", itself=False, metadata=b"peer", keys=frozenset({1}))


def _both(maker: Maker) -> tuple[AgentPair, FakeAgent, FakeAgent, NixlPeer]:
    """After a failure, with a peer and ``ONE`` registered."""
    pair, peer = AgentPair(LIBRARY, "ours", NixlOptions()), _peer()
    [first] = maker.made
    pair.register(ONE)
    peer.load_metadata(pair.first)
    first.must_not_post = True
    pair.prepare(peer, PART)
    [_, second] = maker.made
    return pair, first, second, peer


def test_the_first_posts_until_it_must_not(maker: Maker) -> None:
    pair, peer = AgentPair(LIBRARY, "ours", NixlOptions()), _peer()
    assert pair.prepare(peer, PART).agent is pair.first
    maker.made[0].must_not_post = True
    posting = [pair.prepare(peer, PART).agent for _ in range(3)]
    assert posting == [maker.made[1]] * 3
    assert maker.made[1].name != "ours"


def test_the_second_is_not_made_of_too_few_file_descriptors(
    maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = AgentPair(LIBRARY, "ours", NixlOptions())
    maker.made[0].must_not_post = True
    with monkeypatch.context() as short:
        short.setattr("resource.getrlimit", lambda _: (20, 20))
        with pytest.raises(TransportError, match=r"of which -?\d+ of 20 are free: raise the limit"):
            pair.prepare(_peer(), PART)
    assert pair.prepare(_peer(), PART).agent is maker.made[1]


def test_the_second_has_the_memory_and_knows_the_peers(maker: Maker) -> None:
    pair, first, second, peer = _both(maker)
    more = pair.register(OTHER)
    for agent in (first, second):
        assert sorted(one.address for one in agent.registered.values()) == [4096, 8192]
        assert agent.known == [b"peer"]
    pair.deregister(more)
    assert list(second.registered.values()) == list(first.registered.values()) == [ONE]
    assert peer.remove_remote() == []
    assert first.known == second.known == []
    pair.close(quiet=True)
    assert first.closed
    assert second.closed


def test_it_is_told_what_a_peer_has_registered_since_and_nothing_twice(maker: Maker) -> None:
    pair, first, second, peer = _both(maker)
    pair.prepare(peer, PART)
    assert second.known == [b"peer"]
    peer.keys = frozenset({1, 2})
    pair.prepare(peer, PART)
    assert second.known == [b"peer", b"peer"]
    assert first.known == [b"peer"]


def test_its_own_memory_is_its_own_peer(maker: Maker) -> None:
    pair, _, second, _ = _both(maker)
    handle = pair.prepare(NixlPeer(name="ours", itself=True), PART)
    assert handle.name == second.name


def test_a_peer_that_is_lost_needs_no_second(maker: Maker) -> None:
    pair, peer = AgentPair(LIBRARY, "ours", NixlOptions()), _peer()
    maker.made[0].must_not_post = peer.lost = True
    with pytest.raises(PeerLostError, match="connect again"):
        pair.prepare(peer, PART)
    assert len(maker.made) == 1


def test_where_no_second_is_to_be_had_nothing_is_left_and_the_next_transfer_tries_again(
    maker: Maker,
) -> None:
    pair, peer = AgentPair(LIBRARY, "ours", NixlOptions()), _peer()
    pair.register(ONE)
    pair.register(OTHER)
    maker.made[0].must_not_post = True
    maker.error = DriverError("too many open files")
    with pytest.raises(TransportError, match="too many open files"):
        pair.prepare(peer, PART)
    maker.error = None
    maker.refused = {OTHER}
    with pytest.raises(TransportError, match="told to refuse"):
        pair.prepare(peer, PART)
    assert maker.made[1].closed
    assert not maker.made[1].registered
    maker.refused = set()
    assert pair.prepare(peer, PART).agent is maker.made[2]
    assert len(maker.made[2].registered) == 2


def test_memory_that_one_of_them_refuses_is_registered_with_none(maker: Maker) -> None:
    pair, first, second, _ = _both(maker)
    second.refused = {OTHER}
    with pytest.raises(TransportError, match="told to refuse"):
        pair.register(OTHER)
    assert list(first.registered.values()) == [ONE]
