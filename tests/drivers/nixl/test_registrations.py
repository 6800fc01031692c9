"""Registrations with NIXL never overlap, whatever regions do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import TransportError
from kvferry.core.memory import Region
from kvferry.drivers.nixl.registrations import Registrations
from tests.drivers.nixl.fake import FakeAgent


def region(start: int, stop: int, kind: str = "cpu", device: int = 0) -> Region:
    return Region(address=1000 + start, nbytes=stop - start, kind=kind, device=device)


REGIONS = st.tuples(st.integers(0, 30), st.integers(1, 30), st.sampled_from(["cpu", "cuda"])).map(
    lambda drawn: region(drawn[0], drawn[0] + drawn[1], drawn[2])
)


@given(st.lists(REGIONS, unique=True, max_size=12), st.randoms())
def test_registrations_cover_all_regions_and_never_overlap(
    regions: list[Region], order: object
) -> None:
    agent = FakeAgent()
    spans = Registrations(agent)
    for index, one in enumerate(regions):
        spans.add(one, ())
        _check(agent, regions[: index + 1])
    while regions:
        spans.remove(regions.pop(len(regions) // 2))
        _check(agent, regions)
    assert not agent.registered


def _check(agent: FakeAgent, regions: list[Region]) -> None:
    registered = list(agent.registered.values())
    for one in regions:
        assert sum(whole.contains(one) for whole in registered) == 1
    for whole in registered:
        assert any(whole.contains(one) for one in regions)
        for other in registered:
            apart = whole.end <= other.address or other.end <= whole.address
            assert apart or whole is other or whole.kind != other.kind


def test_a_region_within_another_costs_nothing() -> None:
    agent = FakeAgent()
    spans = Registrations(agent)
    spans.add(region(0, 100), ())
    keys = [span.key for span in spans]
    spans.add(region(10, 20), {region(0, 100)})
    spans.remove(region(0, 100))
    assert [span.key for span in spans] == keys
    assert list(agent.registered.values()) == [region(0, 100)]
    assert set(spans.regions) == {region(10, 20)}


def test_registering_anew_is_seen_by_peers() -> None:
    """The key is another one, because the old access rights are void."""
    spans = Registrations(FakeAgent())
    spans.add(region(0, 100), ())
    [first] = [span.key for span in spans]
    spans.remove(region(0, 100))
    spans.add(region(0, 100), ())
    assert [span.key for span in spans] != [first]


def test_memory_in_use_is_not_registered_anew() -> None:
    agent = FakeAgent()
    spans = Registrations(agent)
    spans.add(region(0, 100), ())
    with pytest.raises(TransportError, match="register the larger region first"):
        spans.add(region(50, 150), {region(0, 100)})
    assert list(agent.registered.values()) == [region(0, 100)]


def test_what_was_registered_stays_so_if_its_growth_is_refused() -> None:
    agent = FakeAgent()
    spans = Registrations(agent)
    spans.add(region(0, 100), ())
    agent.refused.add(region(0, 150))
    with pytest.raises(TransportError, match="told to refuse"):
        spans.add(region(50, 150), ())
    assert list(agent.registered.values()) == [region(0, 100)]
    assert region(50, 150) not in spans
    spans.remove(region(0, 100))
    assert not agent.registered
