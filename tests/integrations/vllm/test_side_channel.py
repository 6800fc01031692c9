"""What an engine logs about the address of its side channel. Needs no vLLM."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvferry.integrations.vllm import side_channel
from kvferry.integrations.vllm.config import parse
from kvferry.integrations.vllm.side_channel import report_loopback


def reported(caplog: pytest.LogCaptureFixture, **settings: Any) -> list[tuple[int, str]]:
    with caplog.at_level(logging.INFO):
        report_loopback(parse(settings), chosen="side_channel_host" in settings)
    return [(record.levelno, record.getMessage()) for record in caplog.records]


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("10.0.0.7", "set side_channel_host to 10.0.0.7, the address of this host"),
        (None, "set side_channel_host to an address at which they reach this host"),
    ],
    ids=["a route", "no route"],
)
def test_default_host_is_warned_of_with_the_address_to_set(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    address: str | None,
    remedy: str,
) -> None:
    monkeypatch.setattr(side_channel, "own_address", lambda: address)
    [(level, text)] = reported(caplog, driver="nixl")
    assert level == logging.WARNING
    assert "listens at 127.0.0.1: only engines on this host can load from this one" in text
    assert remedy in text
    assert "if all engines run on this host, set it to 127.0.0.1" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "settings",
    [
        {"driver": "nixl", "side_channel_host": "127.0.0.1"},
        {"driver": "nixl", "side_channel_host": "::1"},
        {"driver": "loopback"},
        {},
    ],
)
def test_chosen_host_and_driver_for_one_host_are_only_noted(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    [(level, text)] = reported(caplog, **settings)
    assert (level, "set" in text) == (logging.INFO, False)


@pytest.mark.parametrize("host", ["10.0.0.7", "192.0.2.7", "fd00::7"])
def test_other_hosts_are_not_noted(caplog: pytest.LogCaptureFixture, host: str) -> None:
    assert reported(caplog, driver="nixl", side_channel_host=host) == []
