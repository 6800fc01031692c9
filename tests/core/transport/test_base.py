"""``BaseTransport``: its bookkeeping and its refusals, with drivers that derive from loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, TypeVar

import msgspec
import pytest

from kvferry.core.errors import (
    DriverError,
    TransportError,
    TransportUnsupportedError,
    TransportUsageError,
)
from kvferry.core.memory import Region
from kvferry.core.transport import Notification, State, parse_options
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback.address import LoopbackAddress
from kvferry.drivers.loopback.transport import LoopbackConnection
from kvferry.drivers.loopback.worker_pool import LoopbackTransfer
from tests.drivers.pairs import Pair, paired

T = TypeVar("T", bound=LoopbackTransport)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pair_of(kind: type[T], stack: ExitStack) -> Pair[T, LoopbackTransport]:
    """Return a pair whose reader is of this kind; both are closed at the end."""
    reader, other = kind(), LoopbackTransport()
    for each in (reader, other):
        stack.callback(each.close)
    return paired(reader, other)


# Memory and connections.


def test_as_many_regions_are_registered_as_an_address_holds(stack: ExitStack) -> None:
    class Narrow(LoopbackTransport):
        max_regions = 1

    pair = pair_of(Narrow, stack)
    pair.reader.register(pair.local)
    more = Region(address=pair.local.address, nbytes=8)
    with pytest.raises(TransportError, match="1 regions are registered, and an address holds no"):
        pair.reader.register(more)
    pair.reader.deregister(pair.local)
    pair.reader.register(more)


class Meeting(LoopbackTransport):
    """Each connection is made only when ``connecting`` lets it."""

    connecting = threading.Barrier(1)

    def _connect(self, address: LoopbackAddress) -> LoopbackConnection:
        self.connecting.wait(60)
        return super()._connect(address)


def test_two_concurrent_connects_to_one_peer_share_a_connection(stack: ExitStack) -> None:
    pair = pair_of(Meeting, stack)
    third, fourth = (LoopbackTransport() for _ in range(2))
    for each in (third, fourth):
        stack.callback(each.close)
    # The barrier opens when two connect: one to the third, and the one to the fourth, which is not
    # held up.
    pair.reader.connecting = threading.Barrier(2)
    addresses = [third.address(), third.address(), fourth.address()]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(pair.reader.connect, addresses))
    assert found[0] == found[1] != found[2]


class Stubborn(LoopbackTransport):
    """Transfers do not end when they are told to, while it is ``stuck``."""

    grace_seconds = 0.01
    stuck = True

    def _end_transfers(self, transfers: Sequence[LoopbackTransfer], error: TransportError) -> bool:
        if self.stuck:
            return not transfers
        self.grace_seconds = 60.0  # type: ignore[misc]
        return super()._end_transfers(transfers, error)

    def _disconnect(
        self, connection: LoopbackConnection, transfers: Sequence[LoopbackTransfer]
    ) -> None:
        assert not self.stuck or not transfers, "its transfers have not ended"
        super()._disconnect(connection, transfers)


def test_transfers_that_do_not_end_keep_their_peer_connected_but_not_from_being_closed(
    stack: ExitStack,
) -> None:
    pair = pair_of(Stubborn, stack)
    transfer = pair.lasting()
    with pytest.raises(TransportError, match=r"bytes may still arrive from loopback.*, 0\.01 s"):
        pair.reader.disconnect(pair.peer)
    assert not pair.status(transfer).state.final
    assert pair.reader.connect(pair.other.address()) == pair.peer
    pair.reader.stuck = False
    pair.reader.disconnect(pair.peer)
    assert pair.status(transfer).state is State.FAILED
    with pytest.raises(TransportUsageError, match="no peer"):
        pair.reader.disconnect(pair.peer)
    pair = pair_of(Stubborn, stack)
    pair.lasting()
    with pytest.raises(TransportError, match=r"closed, but bytes may still land, 0\.01 s"):
        pair.reader.close()
    pair.reader.close()
    with pytest.raises(TransportUsageError, match="is closed"):
        pair.reader.poll([])
    assert pair.reader.path(pair.peer) == ""


# What the capabilities deny.


class Limited(LoopbackTransport):
    """It can neither cancel nor notify, and takes two transfers at once."""

    def __init__(self) -> None:
        super().__init__()
        self._capabilities = replace(
            self._capabilities, max_outstanding=2, cancel=False, max_notification=0
        )

    def _receive(self) -> list[Notification]:
        raise AssertionError("it carries no notifications")


def test_what_the_capabilities_deny_is_refused_or_changes_nothing(stack: ExitStack) -> None:
    pair = pair_of(Limited, stack)
    first, _ = pair.lasting(), pair.lasting()
    pair.reader.cancel(first)
    assert pair.status(first).state is State.PENDING
    with pytest.raises(TransportError, match=r"2 transfers are unfinished, and loopback.* takes 2"):
        pair.read()
    pair.reader.disconnect(pair.peer)
    again = replace(pair, peer=pair.reader.connect(pair.other.address()))
    assert again.works()
    assert pair.reader.notifications() == []
    with pytest.raises(TransportUnsupportedError, match="no notifications"):
        pair.reader.notify(again.peer, b"x")


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
