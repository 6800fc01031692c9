"""``BaseTransport``: its bookkeeping and its refusals, with a driver that moves no bytes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import pytest

from kvferry.core.errors import (
    DriverError,
    TransportError,
    TransportUnsupportedError,
    TransportUsageError,
)
from kvferry.core.memory import Region
from kvferry.core.transport import (
    BaseTransport,
    Capabilities,
    PeerId,
    Quiescence,
    State,
    Status,
    TransferId,
    parse_options,
)
from kvferry.core.transport.base import TransferRequest
from kvferry.core.transport.copies import copies_between

HERE = Region(address=1 << 20, nbytes=4096)
MORE = Region(address=3 << 20, nbytes=4096)
THERE = Region(address=2 << 20, nbytes=4096)
ALL = Capabilities(
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


@dataclass(slots=True, eq=False)
class Transfer:
    status: Status = Status(state=State.PENDING)  # noqa: RUF009 - it is frozen


class RecordingTransport(BaseTransport[None, str, Connection, Transfer]):
    """A transport that records the calls of its hooks. An address is a peer's name.

    Attributes:
        stuck: whether transfers stay failing when they are polled.
        settles: whether they fail when their peer is disconnected.
        connecting: what ``_connect`` waits for.
    """

    interface_version = (2, 0)
    grace_seconds = 0.01

    def __init__(self, capabilities: Capabilities = ALL) -> None:
        super().__init__("books", capabilities)
        self.calls: list[tuple[object, ...]] = []
        self.stuck = self.settles = False
        self.connecting = threading.Barrier(1)

    def _register(self, region: Region) -> None:
        self.calls.append(("register", region))

    def _deregister(self, region: Region, registration: None) -> None:
        self.calls.append(("deregister", region))

    def _address(self) -> bytes:
        return b"books"

    def _decode_address(self, address: bytes) -> str:
        return address.decode()

    def _identity(self, address: str) -> str:
        return address[:1]

    def _connect(self, address: str) -> Connection:
        self.connecting.wait(60)
        self.calls.append(("connect", address))
        return Connection(address, self._identity(address), {THERE})

    def _refresh(self, connection: Connection, address: str) -> None:
        self.calls.append(("refresh", address))

    def _disconnect(self, connection: Connection, transfers: Sequence[Transfer]) -> None:
        self.calls.append(("disconnect", connection.name))
        for one in transfers:
            if one.status.state is State.FAILING and self.settles:
                one.status = replace(one.status, state=State.FAILED)

    def _start(self, request: TransferRequest[Connection]) -> Transfer:
        return Transfer()

    def _progress(self, transfers: Sequence[Transfer]) -> None:
        for one in transfers:
            if one.status.state is State.FAILING and not self.stuck:
                one.status = replace(one.status, state=State.FAILED)

    def _fail(self, transfer: Transfer, error: TransportError) -> None:
        if transfer.status.state is State.PENDING:
            transfer.status = Status(state=State.FAILING, error=error)

    def _close(self, transfers: Sequence[Transfer]) -> None:
        self.calls.append(("close", len(transfers)))

    def of(self, name: str) -> list[object]:
        """Return the arguments of all calls of one hook."""
        return [argument for called, argument in self.calls if called == name]


class Connected(RecordingTransport):
    """A transport with a registered region and a peer."""

    def __init__(self, capabilities: Capabilities = ALL) -> None:
        super().__init__(capabilities)
        self.register(HERE)
        self.peer = self.connect(b"peer")

    def start(self) -> TransferId:
        pairs = [(HERE.address, THERE.address, 8)]
        return self.read(self.peer, copies_between(pairs, local=HERE, remote=THERE))

    def state(self, transfer: TransferId) -> State:
        return self.poll([transfer])[0].state


# Connections.


def test_as_many_regions_are_registered_as_an_address_holds() -> None:
    class Narrow(RecordingTransport):
        max_regions = 1

    books = Narrow()
    for _ in range(2):
        books.register(HERE)
    with pytest.raises(TransportError, match="1 regions are registered, and an address holds no"):
        books.register(MORE)
    books.deregister(HERE)
    books.register(MORE)
    assert books.of("register") == [HERE, MORE]


def test_two_concurrent_connects_to_one_peer_share_a_connection() -> None:
    transport = RecordingTransport()
    transport.connecting = threading.Barrier(2)
    # The barrier opens when two of them connect: one to a, and the one to b, which is not held up.
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(transport.connect, (b"a1", b"a2", b"b1")))
    assert len(transport.of("connect")) == 2
    assert found[0] == found[1] != found[2]


class ConnectsInDisconnect(Connected):
    """A transport to whose peer another thread connects while ``disconnect`` runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[PeerId] = []
        self.other = threading.Thread(target=lambda: self.found.append(self.connect(b"peer")))

    def _end_transfers(self, transfers: Sequence[Transfer], error: TransportError) -> bool:
        self.other.start()
        self.other.join(0.2)  # it must not end before this call has
        return super()._end_transfers(transfers, error)


@pytest.mark.parametrize("stuck", [False, True])
def test_connecting_during_a_disconnect_waits_for_its_end(stuck: bool) -> None:
    transport = ConnectsInDisconnect()
    transport.stuck = stuck
    transport.start()
    with pytest.raises(TransportError, match="they stay failing") if stuck else nullcontext():
        transport.disconnect(transport.peer)
    transport.other.join(60)
    (peer,) = transport.found
    assert (peer == transport.peer) == stuck
    transport.peer = peer
    transport.start()


def test_a_peer_whose_transfers_do_not_end_stays_connected() -> None:
    transport = Connected()
    transport.stuck = True
    transfer = transport.start()
    with pytest.raises(TransportError, match=r"bytes may still arrive from peer, 0\.01 s"):
        transport.disconnect(transport.peer)
    assert transport.of("disconnect") == []
    assert transport.state(transfer) is State.FAILING
    transport.stuck = False
    transport.disconnect(transport.peer)
    assert transport.state(transfer) is State.FAILED


class SettlesAtDisconnect(Connected):
    """A transport whose transfers fail when their peer is disconnected."""

    def _end_transfers(self, transfers: Sequence[Transfer], error: TransportError) -> bool:
        for one in transfers:
            self._fail(one, error)
        return True


@pytest.mark.parametrize("settles", [True, False])
def test_failing_transfers_may_become_final_when_their_connection_ends(settles: bool) -> None:
    transport = SettlesAtDisconnect()
    transport.settles, transport.stuck = settles, True
    transfer = transport.start()
    if not settles:
        with pytest.raises(TransportError, match="they stay failing; disconnect again"):
            transport.disconnect(transport.peer)
        assert transport.state(transfer) is State.FAILING
        transport.settles = True
    transport.disconnect(transport.peer)
    assert transport.state(transfer) is State.FAILED


# Transfers.


def test_cancel_without_the_capability_changes_nothing() -> None:
    transport = Connected(replace(ALL, cancel=False))
    transfer = transport.start()
    transport.cancel(transfer)
    assert transport.state(transfer) is State.PENDING


def test_a_transfer_beyond_the_limit_is_refused_and_ended_ones_do_not_count() -> None:
    transport = Connected(replace(ALL, max_outstanding=2))
    first, _ = transport.start(), transport.start()
    with pytest.raises(TransportError, match="2 transfers are unfinished, and books takes 2"):
        transport.start()
    transport.cancel(first)
    transport.start()


# Notifications.


def test_without_the_capability_no_notification_hook_is_called() -> None:
    transport = Connected(replace(ALL, max_notification=0))
    assert transport.notifications() == []
    with pytest.raises(TransportUnsupportedError, match="no notifications"):
        transport.notify(transport.peer, b"x")


# Close.


def test_close_ends_everything_once_even_if_a_hook_raises() -> None:
    transport = Connected()
    transport.start()
    transport.stuck = True
    with pytest.raises(TransportError, match=r"closed, but bytes may still land, 0\.01 s"):
        transport.close()
    transport.close()
    assert transport.of("close") == [1]
    with pytest.raises(TransportUsageError, match="books is closed"):
        transport.poll([])
    assert (transport.name, transport.capabilities, transport.path(transport.peer)) == (
        "books",
        ALL,
        "",
    )


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    threads: Annotated[int, msgspec.Meta(ge=1, le=4)] = 2
    backend: str = "fast"


@pytest.mark.parametrize(
    "options", [{"thread": 3}, {"threads": "3"}, {"threads": 9}, {"backend": None}]
)
def test_an_invalid_option_is_refused_and_all_options_are_listed(
    options: dict[str, object],
) -> None:
    assert parse_options("mine", Options, {"threads": 3}) == Options(threads=3)
    with pytest.raises(DriverError, match=r"of mine: .*has.*threads \(2\), backend \(fast\)"):
        parse_options("mine", Options, options)
