"""Loading the metadata of a peer into NIXL, and metadata that NIXL refuses."""

from __future__ import annotations

import pytest

from kvferry.core.errors import ConnectError, TransportError
from kvferry.drivers.nixl.peer import NixlPeer
from tests.drivers.nixl.fake_agent import FakeAgent


def peer(name: str, metadata: bytes) -> NixlPeer:
    return NixlPeer(name=name, itself=False, metadata=metadata, keys=frozenset({1}))


def test_metadata_under_another_name_removes_no_agent() -> None:
    agent = FakeAgent()
    honest = peer("honest", b"honest")
    honest.load_metadata(agent)
    with pytest.raises(ConnectError, match="an address of other that holds NIXL's metadata of"):
        peer("other", b"honest").load_metadata(agent)
    assert b"honest" in agent.known


class PartlyLoadingAgent(FakeAgent):
    """An agent that keeps a part of the metadata that it refuses, as NIXL does."""

    def add(self, metadata: bytes) -> str:
        self.known.append(metadata)
        raise TransportError("its second half is wrong")


def test_refused_peer_is_removed_from_nixl() -> None:
    agent = PartlyLoadingAgent()
    with pytest.raises(ConnectError, match="its second half is wrong"):
        peer("one", b"one").load_metadata(agent)
    assert agent.known == []


def test_known_peer_is_not_removed_when_an_update_is_refused() -> None:
    """Transfers may be under way, so the caller decides what happens to the peer."""
    agent = PartlyLoadingAgent()
    known = peer("one", b"one")
    known.loaded[agent] = frozenset()
    with pytest.raises(ConnectError):
        known.load_metadata(agent)
    assert agent.known == [b"one"]
