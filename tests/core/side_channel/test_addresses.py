"""The addresses that an engine connects to, since clients can write any host into a ticket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvferry.core.errors import AdmissionError, HandshakeError
from kvferry.core.security import NEARBY, Access, Networks
from kvferry.core.side_channel import sockets as module
from kvferry.core.side_channel.client import fetch, ping
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.side_channel.sockets import is_loopback_host, own_address
from tests.core.resource_limits import no_threads
from tests.core.side_channel.servers import LONG, pinged

HERE = Access(networks=Networks.of(["127.0.0.0/8"]))
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


@pytest.fixture
def stuck_resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the resolver not answer for ``slow.test`` during the test."""
    release, before = threading.Event(), set(threading.enumerate())

    def look_up() -> list[str]:
        release.wait()
        raise socket.gaierror("nobody knows")

    resolve(monkeypatch, "slow.test", look_up)
    yield
    release.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()


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


def test_a_name_is_resolved_once_and_the_checked_address_is_used(
    server: HandshakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So another address at a second look-up (DNS rebinding) has no effect."""
    found = iter([["127.0.0.1"]])  # a second look-up would raise
    resolve(monkeypatch, "prefill.test", lambda: next(found))
    assert ping("prefill.test", server.port, "prefill", timeout=LONG, access=HERE) == 7


def test_of_several_addresses_only_allowed_ones_are_tried(
    server: HandshakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.2", server.port)) as forbidden:
        forbidden.setblocking(False)
        resolve(monkeypatch, "prefill.test", lambda: ["127.0.0.2", "127.0.0.1"])
        only = Access(networks=Networks.of(["127.0.0.1"]))
        assert ping("prefill.test", server.port, "prefill", timeout=LONG, access=only) == 7
        with pytest.raises(BlockingIOError):
            forbidden.accept()


@pytest.mark.usefixtures("stuck_resolver")
def test_the_number_of_hanging_resolvers_is_bounded(
    server: HandshakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the bound, names are refused at once; numeric addresses need no resolver."""
    monkeypatch.setattr(module, "_resolvers", threading.BoundedSemaphore(2))
    for _ in range(2):
        with pytest.raises(HandshakeError, match=r"no answer from the resolver within 0\.01 s"):
            fetch("slow.test", 4242, "prefill", timeout=0.01)
    with pytest.raises(HandshakeError, match="names are being looked up already"):
        fetch("slow.test", 4242, "prefill", timeout=LONG)
    assert pinged(server) == 7


def test_a_name_is_refused_while_no_thread_can_be_started(
    server: HandshakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed attempt does not count as a hanging resolver: later look-ups work."""
    monkeypatch.setattr(module, "_resolvers", threading.BoundedSemaphore(1))
    resolve(monkeypatch, "prefill.test", lambda: ["127.0.0.1"])
    with no_threads("kvferry-resolve"):
        for _ in range(2):
            with pytest.raises(HandshakeError, match=r"can't start new thread; .*ulimit"):
                ping("prefill.test", server.port, "prefill", timeout=LONG)
    assert ping("prefill.test", server.port, "prefill", timeout=LONG) == 7


def test_addresses_that_are_not_nearby_must_be_allowed_explicitly() -> None:
    with pytest.raises(AdmissionError) as refused:
        ping("198.51.100.7", 1, "prefill", timeout=LONG, access=NEARBY)
    said = str(refused.value)
    assert "allowed_peers (this host and private networks)" in said
    assert "or set allowed_peers to 'anywhere'" in said


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


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("10.0.0.7", False), ("0.0.0.0", False), ("", False)],
)
def test_loopback_hosts(host: str, loopback: bool) -> None:
    assert is_loopback_host(host) is loopback
