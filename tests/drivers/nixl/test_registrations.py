"""Registrations with NIXL never overlap, although regions may."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import TransportError
from kvferry.core.memory import Region
from kvferry.drivers.nixl.registrations import Registrations
from tests.drivers.nixl.fake_agent import FakeAgent


def region(start: int, stop: int, kind: str = "cpu", device: int = 0) -> Region:
    return Region(address=1000 + start, nbytes=stop - start, kind=kind, device=device)


REGIONS = st.tuples(st.integers(0, 30), st.integers(1, 30), st.sampled_from(["cpu", "cuda"])).map(
    lambda drawn: region(drawn[0], drawn[0] + drawn[1], drawn[2])
)


@given(st.lists(REGIONS, unique=True, max_size=12))
def test_registrations_cover_all_regions_and_never_overlap(regions: list[Region]) -> None:
    agent = FakeAgent()
    registrations = Registrations(agent)
    for index, one in enumerate(regions):
        registrations.add(one, ())
        _check(agent, regions[: index + 1])
    while regions:
        registrations.remove(regions.pop(len(regions) // 2))
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


def test_region_within_another_needs_no_registration() -> None:
    agent = FakeAgent()
    registrations = Registrations(agent)
    registrations.add(region(0, 100), ())
    keys = [span.key for span in registrations]
    registrations.add(region(10, 20), {region(0, 100)})
    registrations.remove(region(0, 100))
    assert [span.key for span in registrations] == keys
    assert list(agent.registered.values()) == [region(0, 100)]
    assert [span.users for span in registrations] == [{region(10, 20)}]


def test_registering_again_gives_another_key() -> None:
    """Peers see by the key that their old access rights are void."""
    registrations = Registrations(FakeAgent())
    registrations.add(region(0, 100), ())
    [first] = [span.key for span in registrations]
    registrations.remove(region(0, 100))
    registrations.add(region(0, 100), ())
    assert [span.key for span in registrations] != [first]


def test_registration_in_use_is_not_extended() -> None:
    agent = FakeAgent()
    registrations = Registrations(agent)
    registrations.add(region(0, 100), ())
    with pytest.raises(TransportError, match="register the larger region first"):
        registrations.add(region(50, 150), {region(0, 100)})
    assert list(agent.registered.values()) == [region(0, 100)]


def test_registration_stays_when_its_extension_is_refused() -> None:
    agent = FakeAgent()
    registrations = Registrations(agent)
    registrations.add(region(0, 100), ())
    agent.refused.add(region(0, 150))
    with pytest.raises(TransportError, match="told to refuse"):
        registrations.add(region(50, 150), ())
    assert list(agent.registered.values()) == [region(0, 100)]
    assert [span.users for span in registrations] == [{region(0, 100)}]
    registrations.remove(region(0, 100))
    assert not agent.registered
