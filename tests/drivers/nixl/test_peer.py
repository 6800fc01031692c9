"""A peer that NIXL gets to know, or does not take."""

from __future__ import annotations

import pytest

from kvferry.core.errors import ConnectError, TransportError
from kvferry.drivers.nixl.peer import NixlPeer
from tests.drivers.nixl.fake import FakeAgent


def peer(name: str, metadata: bytes) -> NixlPeer:
    return NixlPeer(name=name, itself=False, metadata=metadata, keys=frozenset({1}))


def test_metadata_under_another_name_does_not_have_its_agent_forgotten() -> None:
    agent = FakeAgent()
    honest = peer("honest", b"honest")
    honest.load_metadata(agent)
    with pytest.raises(ConnectError, match="an address of other that holds NIXL's metadata of"):
        peer("other", b"honest").load_metadata(agent)
    assert b"honest" in agent.known


class Half(FakeAgent):
    """Knows half of what it refuses."""

    def add(self, metadata: bytes) -> str:
        self.known.append(metadata)
        raise TransportError("its second half is wrong")


def test_one_that_nixl_does_not_take_leaves_nothing_of_its_name() -> None:
    agent = Half()
    with pytest.raises(ConnectError, match="its second half is wrong"):
        peer("one", b"one").load_metadata(agent)
    assert agent.known == []


def test_one_that_nixl_knew_is_not_forgotten_over_more_that_it_does_not_take() -> None:
    """Whoever is told again decides what becomes of it: transfers may be under way."""
    agent = Half()
    known = peer("one", b"one")
    known.loaded[agent] = frozenset()
    with pytest.raises(ConnectError):
        known.load_metadata(agent)
    assert agent.known == [b"one"]
