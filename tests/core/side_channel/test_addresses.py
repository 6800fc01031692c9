"""The addresses that an engine connects to, since clients can write any host into a ticket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvferry.core.errors import HandshakeError
from kvferry.core.security import Access, Networks
from kvferry.core.side_channel import sockets as module
from kvferry.core.side_channel.client import fetch, ping
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.side_channel.sockets import is_loopback_host, own_address
from tests.core.side_channel.servers import LONG, pinged, serve

ELSEWHERE = Access(networks=Networks.of(["192.0.2.0/24"]))


def resolve(monkeypatch: pytest.MonkeyPatch, name: str, look_up: Callable[[], list[str]]) -> None:
    """Have the resolver find for a name what ``look_up`` returns."""
    real = socket.getaddrinfo

    def resolved(host: str | None, *args: Any, **options: Any) -> list[Any]:
        if host != name:
            return real(host, *args, **options)
        if options.get("flags"):
            raise socket.gaierror("a name is no number")
        return [entry for each in look_up() for entry in real(each, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]"])
def test_of_several_addresses_of_a_name_the_one_that_listens_is_used(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "::1" in host and not has_ipv6():
        pytest.skip("this host has no IPv6 loopback address")
    resolve(monkeypatch, "prefill.test", lambda: ["::1", "127.0.0.1"])
    with serve(host=host) as server:
        assert server.host == host.strip("[]")
        for name in (host, "prefill.test"):
            assert ping(name, server.port, "prefill", timeout=LONG) == 7


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "localhost"])
def test_an_address_that_is_not_allowed_is_not_connected_to(host: str) -> None:
    """In any notation. A connection would be waiting in the listener's queue."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        with pytest.raises(HandshakeError) as refused:
            fetch(host, listener.getsockname()[1], "prefill", timeout=LONG, access=ELSEWHERE)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert "in none of the networks of allowed_peers (192.0.2.0/24)" in str(refused.value)


def test_a_name_is_resolved_once_and_of_its_addresses_only_allowed_ones_are_tried(
    server: HandshakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So another address at a second look-up (DNS rebinding) has no effect."""
    found = iter([["127.0.0.2", "127.0.0.1"]])  # a second look-up would raise
    resolve(monkeypatch, "prefill.test", lambda: next(found))
    only = Access(networks=Networks.of(["127.0.0.1"]))
    with socket.create_server(("127.0.0.2", server.port)) as forbidden:
        forbidden.setblocking(False)
        assert ping("prefill.test", server.port, "prefill", timeout=LONG, access=only) == 7
        with pytest.raises(BlockingIOError):
            forbidden.accept()


def test_the_number_of_hanging_resolvers_is_bounded(
    server: HandshakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the bound, names are refused at once; numeric addresses need no resolver."""
    monkeypatch.setattr(module, "_resolvers", threading.BoundedSemaphore(2))
    release = threading.Event()

    def look_up() -> list[str]:
        release.wait(LONG)
        return ["127.0.0.1"]

    resolve(monkeypatch, "slow.test", look_up)
    for _ in range(2):
        with pytest.raises(HandshakeError, match=r"no answer from the resolver within 0\.01 s"):
            fetch("slow.test", 4242, "prefill", timeout=0.01)
    with pytest.raises(HandshakeError, match="names are being looked up already"):
        fetch("slow.test", 4242, "prefill", timeout=LONG)
    assert pinged(server) == 7
    release.set()
    for thread in threading.enumerate():
        if thread.name == "kvferry-resolve":
            thread.join(LONG)
    assert ping("slow.test", server.port, "prefill", timeout=LONG) == 7


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
    def make(family: int, kind: int) -> MagicMock:
        assert kind == socket.SOCK_DGRAM
        made = MagicMock()
        opened = made.__enter__.return_value
        opened.getsockname.return_value = routes.get(family), 9
        opened.connect.side_effect = None if family in routes else OSError("unreachable")
        return made

    monkeypatch.setattr(socket, "socket", make)
    assert own_address() == address


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("10.0.0.7", False), ("0.0.0.0", False), ("", False)],
)
def test_loopback_hosts(host: str, loopback: bool) -> None:
    assert is_loopback_host(host) is loopback
