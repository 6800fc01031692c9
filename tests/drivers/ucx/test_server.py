"""The serving side, over a worker that only notes what it is asked."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import cast

import pytest

from kvferry.core.errors import TransportError
from kvferry.drivers.ucx import server as module
from kvferry.drivers.ucx.messages import Bye, Hello, Message, Note, Refused, Welcome
from kvferry.drivers.ucx.server import Server
from kvferry.drivers.ucx.ucp import Endpoint
from kvferry.drivers.ucx.worker import Worker
from tests.drivers.test_ucx_format import ONE, UNIFIED

INSTANCE = b"i" * 16


def id_of(number: int) -> bytes:
    """Return a connection's id for each number."""
    return bytes([number]) * 16


def worker_of(number: int) -> bytes:
    """Return another worker's address for each number."""
    return ONE[:1] + number.to_bytes(8, "little") + ONE[9:]


GONE = worker_of(99)
"""The address of a worker that nobody reaches."""


class Noted:
    """A worker that notes, by addresses, whom it connects to, what it says, and whom it closes."""

    def __init__(self, address: bytes = ONE) -> None:
        self.address = address
        self.arrived: deque[Message] = deque()
        self.connected: list[bytes] = []
        self.said: list[tuple[bytes, Message]] = []
        self.ended: list[bytes] = []
        self.closing = False
        self.numbers = itertools.count(1)

    def run_once(self) -> bool:
        return False

    def failures(self) -> list[tuple[int, int]]:
        return []

    def messages(self) -> Iterator[Message]:
        while self.arrived:
            yield self.arrived.popleft()

    def connect(self, address: bytes) -> tuple[Endpoint, int]:
        if address == GONE:
            raise TransportError("destination is unreachable")
        self.connected.append(address)
        return Endpoint(len(self.connected)), next(self.numbers)

    def send(self, endpoint: Endpoint, message: Message) -> None:
        self.said.append((self.connected[endpoint - 1], message))

    def close_endpoint(self, endpoint: Endpoint) -> None:
        self.ended.append(self.connected[endpoint - 1])


class Host:
    """A server over such a worker."""

    def __init__(self, address: bytes = ONE) -> None:
        self.worker = worker = Noted(address)
        self.server = Server(lambda: cast(Worker, worker), INSTANCE)

    def hear(self, *messages: Message) -> None:
        self.worker.arrived.extend(messages)
        self.server.run_once()

    def hear_while_closing(self, *messages: Message) -> None:
        """Hear them while an endpoint is being closed, which makes hellos wait."""
        self.worker.closing = True
        self.hear(*messages)
        self.worker.closing = False
        self.server.run_once()

    def notifications(self) -> list[tuple[str, bytes]]:
        return [(note.sender, note.payload) for note in self.server.take_notifications()]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """A server with low limits."""
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(module, "MAX_REFUSED", 3)
    monkeypatch.setattr(module, "MAX_WAITING_HELLOS", 2)
    return Host()


def hello(
    number: int = 1,
    client: str = "one",
    worker: bytes = b"",
    server: bytes = INSTANCE,
    index: int = 0,
) -> Hello:
    return Hello(id_of(number), server, client, worker or worker_of(number), 0, index)


@pytest.mark.parametrize(
    ("address", "wrong"),
    [
        *[(ONE, one) for one in (b"\0", b"nonsense", ONE[:-1], b"\x2f" + ONE[1:], UNIFIED)],
        (UNIFIED, None),
    ],
)
def test_what_ucx_did_not_pack_does_not_reach_it(address: bytes, wrong: bytes | None) -> None:
    """Unless UCX packs in a way that is not known: then nothing can be checked."""
    host = Host(address)
    host.hear(hello(worker=wrong or address))
    assert host.worker.connected == ([] if wrong else [address])


def test_what_is_for_another_instance_is_dropped_and_ends_no_connection(host: Host) -> None:
    host.hear(hello(server=bytes(16)), hello(server=bytes(16), worker=b"nonsense"))
    assert host.worker.connected == []
    host.hear(hello(1), hello(2, server=bytes(16)))
    assert (host.worker.connected, host.worker.ended) == ([worker_of(1)], [])
    assert host.worker.said == [(worker_of(1), Welcome(id_of(1), []))]


def test_a_client_that_is_gone_and_a_message_for_a_client_change_nothing(host: Host) -> None:
    host.hear(hello(2, "gone", GONE), Note(id_of(2), b"nobody"))
    host.hear(hello(1), Welcome(id_of(1), []), Note(id_of(1), b"hello"))
    assert host.worker.said == [(worker_of(1), Welcome(id_of(1), []))]
    assert host.notifications() == [("one", b"hello")]


def test_a_second_hello_with_a_connections_id_does_not_take_its_place(host: Host) -> None:
    host.hear(hello(1))
    host.hear(hello(1, "two", worker_of(2)))
    host.hear(hello(1, "one", worker_of(3), index=1))
    assert (host.worker.connected, host.worker.ended) == ([worker_of(1)], [])
    host.hear(Note(id_of(1), b"x"))
    assert host.notifications() == [("one", b"x")]
    # Nor where the first is not answered yet.
    host.hear_while_closing(hello(4, "three"), hello(4, "four", worker_of(5)))
    assert host.worker.connected[1:] == [worker_of(4)]


@pytest.mark.parametrize("same_id", [True, False])
def test_a_client_may_begin_its_own_connection_again(host: Host, same_id: bool) -> None:
    host.hear(hello(1))
    host.hear(hello(1 if same_id else 2, worker=worker_of(2)))
    assert host.worker.connected == [worker_of(1), worker_of(2)]
    assert host.worker.ended == [worker_of(1)]


def test_what_arrives_on_a_replaced_connection_is_dropped(host: Host) -> None:
    """The endpoint of the replaced connection may still be open."""
    host.hear(hello(1), hello(2), Note(id_of(1), b"late"), Note(id_of(2), b"x"))
    assert host.notifications() == [("one", b"x")]


def test_beyond_so_many_connections_clients_are_refused(host: Host) -> None:
    host.hear(*(hello(n, str(n)) for n in range(8)))
    said = [message for _, message in host.worker.said]
    assert [type(message) for message in said] == [Welcome] * 2 + [Refused] * 6
    assert isinstance(said[-1], Refused)
    assert "it serves 2 connections, and no more" in said[-1].reason
    # A refusal is given time to arrive, a bounded number of them.
    assert host.worker.ended == [worker_of(number) for number in (2, 3, 4)]
    # A place that is given up is taken by the next.
    host.hear(Bye(id_of(0)), hello(9, "x"))
    assert host.worker.said[-1] == (worker_of(9), Welcome(id_of(9), []))


@pytest.mark.parametrize(("waits", "answered"), [(True, 2), (False, 5)])
def test_hellos_that_wait_are_bounded_and_others_are_all_answered(
    host: Host, waits: bool, answered: int
) -> None:
    hear = host.hear_while_closing if waits else host.hear
    hear(*(hello(n, str(n)) for n in range(5)))
    assert host.worker.connected == [worker_of(number) for number in range(answered)]


def test_a_client_that_begins_again_while_it_waits_has_one_connection(host: Host) -> None:
    """The first would answer to nothing, and hold up every deregistration."""
    host.hear_while_closing(hello(1), hello(2))
    assert host.worker.said == [(worker_of(2), Welcome(id_of(2), []))]


def test_of_too_many_notifications_the_client_with_most_pays(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(module, "MAX_BACKLOG", 8 * (module._NOTIFICATION_BYTES + 4))
    host.hear(hello(1, "floods"), hello(3, "floods", index=1), hello(2, "honest"))
    # In turns, so that it is not the first, nor the last, that has most.
    spam, more_spam, done = (Note(id_of(n), b"done") for n in (1, 3, 2))
    host.hear(*[spam] * 4, done)
    host.hear(*[more_spam] * 4, Note(id_of(2), b"more"))
    assert host.worker.ended == [worker_of(1), worker_of(3)]
    assert host.notifications() == [("honest", b"done"), ("honest", b"more")]
    # What it sends on its ended connections is dropped, and counts no more.
    host.hear(*[spam] * 20, *[done] * 8)
    assert len(host.notifications()) == 8
    assert host.worker.ended == [worker_of(1), worker_of(3)]
