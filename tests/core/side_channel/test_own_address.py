"""The address of this host on its route to other hosts."""

from __future__ import annotations

import socket
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvferry.core.side_channel.sockets import is_loopback_host, own_address


def host_with(routes: dict[int, str]) -> Any:
    """Return what makes UDP sockets on a host with these routes: family to local address."""

    def make(family: int, kind: int) -> MagicMock:
        assert kind == socket.SOCK_DGRAM
        made = MagicMock()
        opened = made.__enter__.return_value
        opened.getsockname.return_value = routes.get(family), 9
        opened.connect.side_effect = None if family in routes else OSError("unreachable")
        return made

    return make


@pytest.mark.parametrize(
    ("routes", "address"),
    [
        ({socket.AF_INET: "10.0.0.7", socket.AF_INET6: "fd00::7"}, "10.0.0.7"),
        ({socket.AF_INET6: "fd00::7"}, "fd00::7"),
        ({socket.AF_INET: "127.0.0.1", socket.AF_INET6: "fd00::7"}, "fd00::7"),
        ({socket.AF_INET: "127.0.0.1"}, None),
        ({}, None),
    ],
)
def test_ipv4_is_preferred_and_loopback_is_none(
    monkeypatch: pytest.MonkeyPatch, routes: dict[int, str], address: str | None
) -> None:
    monkeypatch.setattr(socket, "socket", host_with(routes))
    assert own_address() == address


def test_address_is_of_this_host() -> None:
    address = own_address()
    if address is None:
        pytest.skip("this host has no network")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        assert server.getsockname()[0] == address


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("10.0.0.7", False), ("0.0.0.0", False), ("", False)],
)
def test_loopback_hosts(host: str, loopback: bool) -> None:
    assert is_loopback_host(host) is loopback
