"""The books that ``BaseTransport`` keeps, and what it refuses, over a driver that moves nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvferry.core.errors import (
    ConnectError,
    PeerLostError,
    TransferCancelledError,
    TransportError,
    TransportUnsupportedError,
    TransportUsageError,
)
from kvferry.core.memory import Region
from kvferry.core.transport import (
    BaseTransport,
    Capabilities,
    Notification,
    PeerId,
    Quiescence,
    State,
    Status,
    TransferId,
)
from kvferry.core.transport.base import TransferRequest
from kvferry.core.transport.copies import Copies, copies_between

HERE = Region(address=1 << 20, nbytes=4096)
MORE = Region(address=3 << 20, nbytes=4096)
THERE = Region(address=2 << 20, nbytes=4096)
ALL = Capabilities(
    ops=frozenset({"read", "write"}),
    memory=frozenset({"cpu"}),
    max_notification=8,
    cancel=True,
    background_progress=False,
    quiescence=Quiescence.ALWAYS,
    concurrent_connect=True,
)


@dataclass(slots=True, eq=False)
class Connection:
    name: str
    identity: str
    regions: set[Region]
    gone: bool = False


@dataclass(slots=True, eq=False)
class Transfer:
    request: TransferRequest[Connection]
    status: Status


class Books(BaseTransport[int, str, Connection, Transfer]):
    """Remembers what its hooks were called with. An address is a peer's name."""

    interface_version = (1, 0)
    grace_seconds = 0.01
    settles = False

    def __init__(self, capabilities: Capabilities = ALL) -> None:
        super().__init__("books", capabilities)
        self.calls: list[tuple[object, ...]] = []
        self.born = Status(state=State.PENDING)
        self.stuck = False
        self.inbox: list[Notification] = []
        self.connecting = threading.Barrier(1)

    def _register(self, region: Region) -> int:
        self.calls.append(("register", region))
        return region.address

    def _deregister(self, region: Region, registration: int) -> None:
        self.calls.append(("deregister", region, registration))

    def _address(self) -> bytes:
        return b"books"

    def _decode_address(self, address: bytes) -> str:
        if not address:
            raise ConnectError("empty")
        return address.decode()

    def _identity(self, address: str) -> str:
        return address[:1]

    def _connect(self, address: str) -> Connection:
        self.connecting.wait(20)
        self.calls.append(("connect", address))
        return Connection(address, self._identity(address), {THERE})

    def _refresh(self, connection: Connection, address: str) -> None:
        self.calls.append(("refresh", address))

    def _disconnect(self, connection: Connection, transfers: Sequence[Transfer]) -> None:
        self.calls.append(("disconnect", connection.name, len(transfers)))
        for one in transfers:
            if one.status.state is State.FAILING and self.settles:
                one.status = replace(one.status, state=State.FAILED)

    def _start(self, request: TransferRequest[Connection]) -> Transfer:
        return Transfer(request, self.born)

    def _progress(self, transfers: Sequence[Transfer]) -> None:
        self.calls.append(("progress", len(transfers)))
        for one in transfers:
            if one.status.state is State.FAILING and not self.stuck:
                one.status = replace(one.status, state=State.FAILED)

    def _fail(self, transfer: Transfer, error: TransportError) -> None:
        if transfer.status.state is State.PENDING:
            transfer.status = Status(state=State.FAILING, error=error)

    def _notify(self, connection: Connection, payload: bytes) -> None:
        self.calls.append(("notify", connection.name, payload))
        if connection.gone:
            raise PeerLostError("gone")

    def _receive(self) -> list[Notification]:
        return self.inbox

    def _close(self, transfers: Sequence[Transfer]) -> None:
        self.calls.append(("close", len(transfers)))

    def of(self, name: str) -> list[tuple[object, ...]]:
        """The calls of one hook, without its name."""
        return [call[1:] for call in self.calls if call[0] == name]


class Connected(Books):
    """With a registered region and a peer."""

    def __init__(self, capabilities: Capabilities = ALL) -> None:
        super().__init__(capabilities)
        self.register(HERE)
        self.peer = self.connect(b"peer")

    def start(self, nbytes: int = 8, notify: bytes | None = None) -> TransferId:
        return self.read(self.peer, _copies(nbytes), notify)


def _copies(nbytes: int = 8) -> Copies:
    pairs = [(HERE.address, THERE.address, nbytes)]
    return copies_between(pairs, local=HERE, remote=THERE)


# Memory.


def test_a_region_is_registered_once_and_given_back_with_what_was_got_for_it() -> None:
    books = Books()
    for _ in range(2):
        books.register(HERE)
    assert books.of("register") == [(HERE,)]
    books.deregister(HERE)
    assert books.of("deregister") == [(HERE, HERE.address)]
    with pytest.raises(TransportUsageError, match="is not registered"):
        books.deregister(HERE)


def test_a_kind_of_memory_that_it_does_not_have_is_refused() -> None:
    books = Books()
    with pytest.raises(TransportUnsupportedError, match="books reaches cpu memory, not cuda"):
        books.register(replace(HERE, kind="cuda"))
    assert books.calls == []


def test_what_an_unfinished_transfer_uses_is_not_deregistered() -> None:
    books = Connected()
    books.register(MORE)
    transfer = books.start()
    with pytest.raises(TransportUsageError, match="an unfinished transfer uses"):
        books.deregister(HERE)
    books.deregister(MORE)
    books.cancel(transfer)
    books.poll([])  # one that it is not asked about
    with pytest.raises(TransportUsageError, match="an unfinished transfer uses"):
        books.deregister(HERE)
    books.poll([transfer])
    books.deregister(HERE)


# Connections.


def test_addresses_of_equal_identity_lead_to_one_peer() -> None:
    books = Books()
    first, other = books.connect(b"a1"), books.connect(b"b1")
    assert (books.connect(b"a2"), books.connect(b"b2")) == (first, other)
    assert books.of("connect") == [("a1",), ("b1",)]
    assert books.of("refresh") == [("a2",), ("b2",)]
    books.disconnect(first)
    assert books.connect(b"a3") not in (first, other)


def test_two_that_connect_to_one_peer_at_once_get_one_connection() -> None:
    books = Books()
    books.connecting = threading.Barrier(2)
    found: list[PeerId] = []
    threads = [
        threading.Thread(target=lambda name=name: found.append(books.connect(name)))
        for name in (b"a1", b"a2", b"b1")
    ]
    for thread in threads:
        thread.start()
    # The barrier opens when two of them connect: one to a, and the one to b, which is not held up.
    for thread in threads:
        thread.join(20)
    assert len(books.of("connect")) == 2
    assert len(set(found)) == 2
    assert len(found) == 3


def test_an_address_that_is_none_leaves_nothing_behind() -> None:
    books = Books()
    with pytest.raises(ConnectError):
        books.connect(b"")
    books.connecting.abort()
    with pytest.raises(threading.BrokenBarrierError):
        books.connect(b"a")
    books.connecting = threading.Barrier(1)
    books.connect(b"a")
    assert books.of("refresh") == []


def test_disconnect_ends_the_unfinished_transfers_of_that_peer_only() -> None:
    books = Connected()
    other = books.connect(b"other")
    mine, theirs = books.start(), books.read(other, _copies())
    books.disconnect(books.peer)
    assert books.of("disconnect") == [("peer", 1)]
    ended, pending = books.poll([mine, theirs])
    assert ended.state is State.FAILED
    assert isinstance(ended.error, PeerLostError)
    assert pending.state is State.PENDING
    with pytest.raises(TransportUsageError, match=rf"no peer {books.peer}; connected: \[{other}\]"):
        books.disconnect(books.peer)


def test_a_peer_whose_transfers_do_not_end_stays_connected() -> None:
    books = Connected()
    books.stuck = True
    transfer = books.start()
    with pytest.raises(TransportError, match=r"bytes may still move to or from peer, 0\.01 s"):
        books.disconnect(books.peer)
    assert books.of("disconnect") == []
    assert books.poll([transfer])[0].state is State.FAILING
    books.stuck = False
    books.disconnect(books.peer)
    assert books.poll([transfer])[0].state is State.FAILED


class SettlesAtDisconnect(Connected):
    """Its transfers have ended as far as they do when they are FAILING."""

    def _end_transfers(self, transfers: Sequence[Transfer], error: TransportError) -> bool:
        for one in transfers:
            self._fail(one, error)
        return True


@pytest.mark.parametrize("settles", [True, False])
def test_transfers_may_become_final_with_the_end_of_their_connection(settles: bool) -> None:
    books = SettlesAtDisconnect()
    books.settles, books.stuck = settles, True
    transfer = books.start()
    if not settles:
        with pytest.raises(TransportError, match="they stay failing; disconnect again"):
            books.disconnect(books.peer)
        assert books.poll([transfer])[0].state is State.FAILING
        books.settles = True
    books.disconnect(books.peer)
    assert books.poll([transfer])[0].state is State.FAILED


# Transfers.


def test_a_driver_gets_a_request_that_has_been_checked() -> None:
    books = Connected()
    transfer = books.write(books.peer, _copies(), b"said")
    request = books._transfers[transfer].transfer.request
    assert (set(request.local), set(request.remote)) == ({HERE}, {THERE})
    assert (request.notify, request.write, request.connection.name) == (b"said", True, "peer")


@pytest.mark.parametrize(
    ("copies", "reason"),
    [
        (
            copies_between([(0, 0, 8)], local=MORE, remote=THERE),
            "local .* is not registered; 1 regions are",
        ),
        (
            copies_between([(0, 0, 8)], local=HERE, remote=MORE),
            "among the 1 regions known of peer: .*again",
        ),
        (_copies(4097), "copy 0 leaves its local region"),
        (replace(_copies(), nbytes=np.zeros(2, np.uint64)), "must be uint64 of shape"),
    ],
)
def test_mistakes_reach_no_driver(copies: Copies, reason: str) -> None:
    books = Connected()
    with pytest.raises(TransportUsageError, match=reason):
        books.read(books.peer, copies)
    assert not books._transfers
    books.deregister(HERE)


def test_the_scratch_of_the_bounds_check_grows() -> None:
    books, n = Connected(), 10_000
    pairs = [(HERE.address, THERE.address, 8)] * n
    copies = copies_between(pairs, local=HERE, remote=THERE)
    books.read(books.peer, copies)
    copies.nbytes[-1] = 4097
    with pytest.raises(TransportUsageError, match=f"copy {n - 1} leaves"):
        books.read(books.peer, copies)


def test_an_op_that_it_does_not_have_is_refused_closed_or_not() -> None:
    books = Connected(replace(ALL, ops=frozenset({"read"})))
    for _ in range(2):
        with pytest.raises(TransportUnsupportedError, match="Connected cannot write; it can read"):
            books.write(books.peer, _copies())
        books.close()


def test_a_transfer_may_have_failed_when_it_is_started() -> None:
    books = Connected()
    books.born = Status(state=State.FAILED, error=PeerLostError("gone"))
    transfer = books.start()
    assert books.poll([transfer, transfer]) == [books.born] * 2
    books.forget(transfer)
    with pytest.raises(TransportUsageError, match=f"no transfer {transfer}"):
        books.poll([transfer])
    assert books.start() != transfer


@pytest.mark.parametrize("state", State)
def test_only_final_transfers_are_forgotten(state: State) -> None:
    books = Connected()
    books.born, books.stuck = Status(state=state), True
    transfer = books.start()
    if state.final:
        books.forget(transfer)
        assert not books._transfers
        return
    with pytest.raises(TransportUsageError, match=f"transfer {transfer} is not final"):
        books.forget(transfer)


def test_cancel_fails_what_is_unfinished_and_nothing_else() -> None:
    books = Connected()
    transfer = books.start()
    with pytest.raises(TransportUsageError, match="is not final"):
        books.forget(transfer)
    books.cancel(transfer)
    (status,) = books.poll([transfer])
    assert isinstance(status.error, TransferCancelledError)
    books.cancel(transfer)
    assert books.poll([transfer]) == [status]
    with pytest.raises(TransportUsageError, match="no transfer"):
        books.cancel(TransferId(99))


def test_without_the_capability_cancel_changes_nothing() -> None:
    books = Connected(replace(ALL, cancel=False))
    transfer = books.start()
    books.cancel(transfer)
    assert books.poll([transfer])[0].state is State.PENDING


def test_one_transfer_more_than_the_limit_is_refused_and_those_that_ended_do_not_count() -> None:
    books = Connected(replace(ALL, max_outstanding=2))
    first, _ = books.start(), books.start()
    with pytest.raises(TransportError, match="2 transfers are unfinished, and books takes 2"):
        books.start()
    books.cancel(first)
    books.start()


# Notifications.


def test_notifications_go_to_connected_peers_and_a_peer_that_is_gone_is_no_error() -> None:
    books = Connected()
    books.notify(books.peer, b"one")
    books._peers[books.peer].gone = True
    books.notify(books.peer, b"two")
    assert books.of("notify") == [("peer", b"one"), ("peer", b"two")]
    with pytest.raises(TransportUsageError, match="no peer"):
        books.notify(PeerId(99), b"x")


@pytest.mark.parametrize(("payload", "said"), [(b"", "0"), (b"123456789", "9"), ("text", "str")])
def test_an_invalid_payload_is_refused(payload: bytes, said: str) -> None:
    books = Connected()
    for send in (lambda: books.notify(books.peer, payload), lambda: books.start(8, payload)):
        with pytest.raises(TransportUsageError, match=f"is 1 to 8 bytes; this one: {said}"):
            send()
    books.notify(books.peer, b"12345678")
    assert books.of("notify") == [("peer", b"12345678")]


def test_without_notifications_no_hook_is_called() -> None:
    books = Connected(replace(ALL, max_notification=0))
    books.inbox = [Notification(sender="nobody", payload=b"x")]
    assert books.notifications() == []
    with pytest.raises(TransportUnsupportedError, match="no notifications"):
        books.notify(books.peer, b"x")


# The end.


def test_a_transport_is_usable_until_its_end_which_comes_once() -> None:
    books = Books()
    books._check_usable()
    assert books._end()
    assert not books._end()
    with pytest.raises(TransportUsageError, match="books is closed"):
        books._check_usable()


def test_a_fork_may_not_use_a_transport_and_does_not_close_it() -> None:
    books = Books()
    child = os.fork()
    if child == 0:
        try:
            books.poll([])
        except TransportUsageError as exc:
            books.close()
            os._exit(0 if "fork" in str(exc) and not books._end() and not books.calls else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    books.poll([])


def test_close_ends_everything_once_even_if_it_raises() -> None:
    books = Connected()
    books.start()
    books.stuck = True
    with pytest.raises(TransportError, match=r"closed, but bytes may still land, 0\.01 s"):
        books.close()
    books.close()
    assert books.of("close") == [(1,)]
    with pytest.raises(TransportUsageError, match="books is closed"):
        books.poll([])
    assert (books.name, books.capabilities, books.path(books.peer)) == ("books", ALL, "")
