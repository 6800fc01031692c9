"""The warning that only engines of this host can load from an engine. Needs no vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.integrations.vllm import side_channel
from kvferry.integrations.vllm.config import parse
from kvferry.integrations.vllm.side_channel import loopback_risk


def test_default_host_is_warned_of_with_the_address_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("10.0.0.7", None):
        monkeypatch.setattr(side_channel, "own_address", lambda found=address: found)
        risk = loopback_risk(parse({"driver": "nixl"}), chosen=False)
        assert risk is not None
        assert "listens at 127.0.0.1: only engines on this host can load from this one" in risk
        assert f"set side_channel_host to {address or 'an address'}" in risk


@pytest.mark.parametrize(
    "settings",
    [
        {"driver": "nixl", "side_channel_host": "127.0.0.1"},
        {"driver": "nixl", "side_channel_host": "10.0.0.7"},
        {"driver": "loopback"},
    ],
)
def test_chosen_hosts_and_drivers_for_one_host_are_none(settings: dict[str, Any]) -> None:
    assert loopback_risk(parse(settings), chosen="side_channel_host" in settings) is None
