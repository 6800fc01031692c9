"""The address of this host on its route to other hosts."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from kvferry.core.side_channel.sockets import is_loopback_host, own_address


class StandInSocket:
    """A UDP socket on a host with the given routes: family to local address. It cannot send."""

    routes: dict[int, str]

    def __init__(self, family: int, kind: int) -> None:
        assert kind == socket.SOCK_DGRAM
        self._family = family

    def __enter__(self) -> StandInSocket:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connect(self, address: tuple[str, int]) -> None:
        if self._family not in self.routes:
            raise OSError("Network is unreachable")

    def getsockname(self) -> tuple[str, int]:
        return self.routes[self._family], 9


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
    stand_in: Any = type("Routed", (StandInSocket,), {"routes": routes})
    monkeypatch.setattr(socket, "socket", stand_in)
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
