"""Registrations never overlap, and after the first failed transfer a second agent has them all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import DriverError, PeerLostError, TransportError
from kvferry.core.memory import Region
from kvferry.drivers.nixl import agents as module
from kvferry.drivers.nixl.agent import TransferChunk
from kvferry.drivers.nixl.agents import Agents, RegisteredSpan
from kvferry.drivers.nixl.library import NixlLibrary
from kvferry.drivers.nixl.options import NixlOptions
from kvferry.drivers.nixl.peer import NixlPeer
from tests.drivers.nixl.fake_agent import FakeAgent

LIBRARY = NixlLibrary(
    package="fake", version="0", api=None, errors=(ValueError,), lost=OSError, unknown=KeyError
)
CHUNK = TransferChunk(local=None, remote=None)


class FakeAgents:
    """The agents of a transport, and what its next agent refuses or raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[FakeAgent] = []
        self.refused: set[Region] = set()
        self.error: Exception | None = None
        monkeypatch.setattr(module, "Agent", self._make)
        self.agents = Agents(LIBRARY, "ours", NixlOptions())
        self.spans: dict[Region, RegisteredSpan] = {}
        self.peer = NixlPeer(name="peer", itself=False, metadata=b"peer", keys=frozenset({1}))

    def _make(self, library: NixlLibrary, name: str, options: NixlOptions) -> FakeAgent:
        if self.error is not None:
            raise self.error
        self.made.append(FakeAgent(name))
        self.made[-1].refused = set(self.refused)
        return self.made[-1]

    def register(self, *regions: Region) -> None:
        for one in regions:
            self.spans[one] = self.agents.register(one)

    def deregister(self, region: Region) -> None:
        self.agents.deregister(self.spans.pop(region))

    def fail(self) -> None:
        """Let the first agent post no more, as after a failed transfer."""
        self.made[0].must_not_post = True

    def posting(self) -> FakeAgent:
        """Return the agent in which a transfer is prepared now."""
        agent = self.agents.prepare(self.peer, CHUNK).agent
        assert isinstance(agent, FakeAgent)
        return agent

    def registered(self) -> list[list[Region]]:
        return [list(agent.registered.values()) for agent in self.made]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeAgents:
    return FakeAgents(monkeypatch)


def region(start: int, stop: int, kind: str = "cpu") -> Region:
    return Region(address=1000 + start, nbytes=stop - start, kind=kind)


WHOLE, PART = region(0, 100), region(10, 20)
OTHER, FAR = region(200, 300), region(500, 600)

REGIONS = st.tuples(st.integers(0, 30), st.integers(1, 30), st.sampled_from(["cpu", "cuda"])).map(
    lambda drawn: region(drawn[0], drawn[0] + drawn[1], drawn[2])
)


@given(st.lists(REGIONS, unique=True, max_size=12))
def test_registrations_cover_all_regions_and_never_overlap(regions: list[Region]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        fakes = FakeAgents(monkeypatch)
        taken: list[Region] = []
        for one in regions:
            overlapped = [each for each in fakes.registered()[0] if _overlap(each, one)]
            if not overlapped or overlapped[0].contains(one):
                fakes.register(one)
                taken.append(one)
            else:
                with pytest.raises(TransportError, match="register the larger region first"):
                    fakes.register(one)
            _check(fakes, taken)
        while taken:
            fakes.deregister(taken.pop(len(taken) // 2))
            _check(fakes, taken)
        assert fakes.registered() == [[]]


def _overlap(one: Region, other: Region) -> bool:
    return one.kind == other.kind and one.address < other.end and other.address < one.end


def _check(fakes: FakeAgents, regions: list[Region]) -> None:
    [registered] = fakes.registered()
    for one in regions:
        assert sum(whole.contains(one) for whole in registered) == 1
    for whole in registered:
        assert any(whole.contains(one) for one in regions)
        assert [whole] == [other for other in registered if _overlap(whole, other)]


def test_region_within_another_changes_no_key_and_one_registered_again_gets_another(
    fakes: FakeAgents,
) -> None:
    """Peers see by the key that their old access rights are void."""
    fakes.register(WHOLE)
    [first] = [span.key for span in fakes.agents.spans]
    fakes.register(PART)
    fakes.deregister(WHOLE)
    assert [(span.key, span.users) for span in fakes.agents.spans] == [(first, 1)]
    fakes.deregister(PART)
    fakes.register(WHOLE)
    assert [span.key for span in fakes.agents.spans] != [first]


def test_second_agent_posts_after_a_failure_with_same_registrations_and_peers(
    fakes: FakeAgents,
) -> None:
    fakes.register(WHOLE)
    assert fakes.posting() is fakes.made[0]
    fakes.fail()
    assert [fakes.posting() for _ in range(3)] == [fakes.made[1]] * 3
    assert fakes.made[1].name != "ours"
    fakes.register(OTHER)
    assert fakes.registered() == [[WHOLE, OTHER]] * 2
    assert [agent.known for agent in fakes.made] == [[b"peer"]] * 2
    itself = fakes.agents.prepare(NixlPeer(name="ours", itself=True), CHUNK)
    assert itself.name == fakes.made[1].name
    fakes.made[1].refused = {FAR}
    with pytest.raises(TransportError, match="told to refuse"):
        fakes.register(FAR)
    assert fakes.registered() == [[WHOLE, OTHER]] * 2
    fakes.deregister(OTHER)
    assert fakes.registered() == [[WHOLE]] * 2
    fakes.peer.remove_remote()
    assert [agent.known for agent in fakes.made] == [[], []]
    fakes.agents.close(quiet=True)
    assert fakes.registered() == [[], []]
    assert all(agent.closed for agent in fakes.made)


def test_second_agent_loads_metadata_when_it_changed_and_the_peer_is_lost_if_it_is_refused(
    fakes: FakeAgents,
) -> None:
    fakes.fail()
    for _ in range(2):
        assert fakes.posting().known == [b"peer"]
    fakes.peer.keys = frozenset({1, 2})
    assert fakes.posting().known == [b"peer", b"peer"]
    assert fakes.made[0].known == []
    fakes.made[1].refuses_metadata = True
    fakes.peer.keys = frozenset({1, 2, 3})
    with pytest.raises(PeerLostError, match="its second half is wrong"):
        fakes.posting()


def test_memory_that_nixl_does_not_give_up_is_an_error_and_other_memory_is_given_up(
    fakes: FakeAgents,
) -> None:
    fakes.register(WHOLE, OTHER)
    fakes.made[0].refused = {WHOLE}
    with pytest.raises(TransportError, match="told to refuse"):
        fakes.deregister(WHOLE)
    fakes.deregister(OTHER)
    assert fakes.registered() == [[WHOLE]]


def test_second_agent_is_not_made_for_a_lost_peer_or_without_enough_descriptors(
    fakes: FakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.fail()
    fakes.peer.lost = True
    with pytest.raises(PeerLostError, match="connect again"):
        fakes.posting()
    fakes.peer.lost = False
    with monkeypatch.context() as short:
        short.setattr("resource.getrlimit", lambda _: (20, 20))
        with pytest.raises(TransportError, match=r"of which -?\d+ of 20 are free: raise the limit"):
            fakes.posting()
    assert len(fakes.made) == 1
    assert fakes.posting() is fakes.made[1]


def test_failed_second_agent_is_closed_and_made_again_by_next_transfer(fakes: FakeAgents) -> None:
    fakes.register(WHOLE, OTHER)
    fakes.fail()
    for error in (DriverError("too many open files"), ValueError("NIXL_ERR_BACKEND")):
        fakes.error = error
        with pytest.raises(TransportError, match=str(error)):
            fakes.posting()
    fakes.error, fakes.refused = None, {OTHER}
    with pytest.raises(TransportError, match="told to refuse"):
        fakes.posting()
    assert fakes.made[1].closed
    assert not fakes.made[1].registered
    fakes.refused = set()
    assert fakes.posting() is fakes.made[2]
    assert len(fakes.made[2].registered) == 2
