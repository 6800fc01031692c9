"""Loading the metadata of a peer into NIXL, and metadata that NIXL refuses."""

from __future__ import annotations

import pytest

from kvferry.core.errors import ConnectError
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


def test_refused_peer_is_removed_unless_it_was_known() -> None:
    """Transfers from a known one may be under way: the caller decides what happens to it."""
    agent = FakeAgent()
    agent.refuses_metadata = True
    some = peer("one", b"one")
    for known in ([], [b"one"]):
        with pytest.raises(ConnectError, match="its second half is wrong"):
            some.load_metadata(agent)
        assert agent.known == known
        some.loaded[agent] = frozenset()
