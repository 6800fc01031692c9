"""Faults of connections, of capabilities, of ``close`` and of forks."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

from kvferry.core.errors import ConnectError, TransportError, TransportUsageError
from kvferry.core.transport import (
    Capabilities,
    EnterThread,
    Notification,
    PeerId,
    TransferId,
    Transport,
    enter_nothing,
)
from kvferry.core.transport.base import _IdentityLocks
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback import address as wire
from kvferry.drivers.loopback.address import RegionRegistry
from kvferry.drivers.loopback.worker_pool import WorkerPool
from kvferry.testing import FaultyTransport
from tests.long.drivers.planted.base import OtherCapabilities, caught_by, replaces


@replaces("connect", "test_connecting_again_tells_which_regions_the_peer_has")
def keeps_the_first_address(driver: LoopbackTransport, address: bytes) -> PeerId:
    before = {peer: found.regions for peer, found in driver._peers.items()}
    peer = LoopbackTransport.connect(driver, address)
    driver._peers[peer].regions = before.get(peer, driver._peers[peer].regions)
    return peer


@replaces("connect", "test_connecting_again_tells_which_regions_the_peer_has")
def keeps_deregistered_regions(driver: LoopbackTransport, address: bytes) -> PeerId:
    before = {peer: found.regions for peer, found in driver._peers.items()}
    peer = LoopbackTransport.connect(driver, address)
    driver._peers[peer].regions = before.get(peer, {}) | driver._peers[peer].regions
    return peer


@replaces("connect", "test_connecting_again_is_the_same_peer_until_it_is_disconnected")
def connect_again_gives_another_id(driver: LoopbackTransport, address: bytes) -> PeerId:
    peer = LoopbackTransport.connect(driver, address)
    other = PeerId(next(driver._ids))
    driver._peers[other] = driver._peers[peer]
    return other


@replaces("connect", "test_connecting_again_is_the_same_peer_until_it_is_disconnected")
def reuses_peer_ids(driver: LoopbackTransport, address: bytes) -> PeerId:
    peer = LoopbackTransport.connect(driver, address)
    first = PeerId(next(one for one in range(1, 1000) if one == peer or one not in driver._peers))
    driver._peers[first] = driver._peers.pop(peer)
    return first


@replaces("connect", "test_bytes_that_are_no_address_are_refused")
def raises_value_error_for_bad_address(driver: LoopbackTransport, address: bytes) -> PeerId:
    if not address.startswith(b"\x89"):
        raise ValueError("bad magic")
    return LoopbackTransport.connect(driver, address)


@replaces("connect", "test_an_address_that_was_changed_on_its_way_harms_nobody")
def raises_other_errors_for_wrong_values(driver: LoopbackTransport, address: bytes) -> PeerId:
    try:
        return LoopbackTransport.connect(driver, address)
    except ConnectError as exc:
        if "both sides must use the same driver" in str(exc):
            raise
        raise KeyError("that region") from exc


@replaces("connect", "test_an_address_that_was_changed_on_its_way_harms_nobody")
def bad_address_ends_other_transfers(driver: LoopbackTransport, address: bytes) -> PeerId:
    try:
        return LoopbackTransport.connect(driver, address)
    except ConnectError:
        for _, _, job in driver._transfers.values():
            driver._workers.stop(job, TransportError("a wrong address"))
        raise


@replaces("connect", "test_an_address_under_another_name_takes_no_connection_away")
def disconnects_peer_with_second_name(driver: LoopbackTransport, address: bytes) -> PeerId:
    theirs = wire.decode(address)
    for peer, found in list(driver._peers.items()):
        if found.identity == driver._identity(theirs) and found.name != theirs.name:
            driver.disconnect(peer)
            raise ConnectError("two names")
    return LoopbackTransport.connect(driver, address)


@caught_by("test_names_are_unique")
class IsNamedAfterItsProcess(LoopbackTransport):
    @property
    def name(self) -> str:
        return f"loopback-{os.getpid()}"


@caught_by("test_its_capabilities_make_sense_and_stay")
class CapabilitiesChange(LoopbackTransport):
    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, cancel=not self._peers)


@caught_by("test_an_option_that_it_does_not_have_is_refused")
class IgnoresUnknownOptions(LoopbackTransport):
    def __init__(self, **options: object) -> None:
        super().__init__()


@caught_by("test_a_limit_of_unfinished_transfers_is_kept")
class ExceedsMaxOutstanding(OtherCapabilities):
    can: ClassVar = {"max_outstanding": 2}


@replaces("connect", "test_a_transport_may_connect_to_itself")
def refuses_its_own_address(driver: LoopbackTransport, address: bytes) -> PeerId:
    if driver.name.encode() in address:
        raise ConnectError("that is me")
    return LoopbackTransport.connect(driver, address)


_OWN = {"interface_version", "__dict__", "__weakref__"}


_STATES_NONE = {name: value for name, value in vars(FaultyTransport).items() if name not in _OWN}


@caught_by("test_it_says_itself_for_which_version_it_was_written")
class InheritsInterfaceVersion(type("Delegating", (Transport,), _STATES_NONE)):  # type: ignore[misc]
    """The driver does not state the interface version for which it was written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(LoopbackTransport(**options))


class AtMostTwo(OtherCapabilities):
    """Base class: at most two unfinished transfers, as ``counted`` counts them."""

    can: ClassVar = {"max_outstanding": 2}

    def counted(self) -> int:
        return sum(not job.final for _, _, job in self._transfers.values())

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        if self.counted() >= 2:
            raise TransportError("too many")
        return super().read(peer, copies, notify)


@caught_by("test_a_limit_of_unfinished_transfers_is_kept")
class CountsEndedTransfers(AtMostTwo):
    def counted(self) -> int:
        return len(self._transfers)


@replaces("read", "test_many_transfers_at_once")
def has_undeclared_limit(
    driver: LoopbackTransport, peer: PeerId, copies: Copies, notify: bytes | None = None
) -> TransferId:
    """It refuses the 101st transfer that was not forgotten, without declaring a limit."""
    if len(driver._transfers) >= 100:
        raise TransportError("too many")
    return LoopbackTransport.read(driver, peer, copies, notify)


@replaces("connect", "test_other_calls_change_nothing_for_a_transfer")
def connect_again_ends_transfers(driver: LoopbackTransport, address: bytes) -> PeerId:
    peer = LoopbackTransport.connect(driver, address)
    for owner, _, job in driver._transfers.values():
        if owner == peer:
            driver._workers.stop(job, TransportError("connected again"))
    return peer


@replaces("close", "test_after_close_every_method_but_close_refuses")
def closes_once(driver: LoopbackTransport) -> None:
    driver._check_usable()
    LoopbackTransport.close(driver)


@replaces("notifications", "test_after_close_every_method_but_close_refuses")
def answers_after_close(driver: LoopbackTransport) -> list[Notification]:
    return [] if driver._closed else LoopbackTransport.notifications(driver)


@caught_by("test_after_close_every_method_but_close_refuses")
class RaisesForLibraryAfterClose(LoopbackTransport):
    @property
    def library(self) -> str:
        self._check_usable()
        return "memcpy"


@caught_by("test_closing_one_leaves_others_alone")
class ClosesSharedState(LoopbackTransport):
    """Closing the transport that was made last ends state that all transports share."""

    made: list[LoopbackTransport] = []  # noqa: RUF012 - the fault

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.made.append(self)

    def close(self) -> None:
        for one in self.made:
            LoopbackTransport.close(one)


@replaces("_check_usable", "test_a_forked_child_is_refused_and_harms_nothing")
def ignores_fork(driver: LoopbackTransport) -> None:
    if driver._closed:
        raise TransportUsageError("closed")


@caught_by("test_what_a_transport_had_registered_is_out_of_reach_once_it_is_closed")
class StaysReadableAfterClose(LoopbackTransport):
    def close(self) -> None:
        self._still_there, self._registry = self._registry, RegionRegistry()
        super().close()


def _shut_down(transport: LoopbackTransport) -> None:
    for peer in transport._peers.values():
        peer.channel.socket.shutdown(socket.SHUT_RDWR)


@replaces("close", "test_a_forked_child_is_refused_and_harms_nothing")
def close_in_fork_shuts_sockets_of_parent(driver: LoopbackTransport) -> None:
    if os.getpid() != driver._pid:
        _shut_down(driver)
    LoopbackTransport.close(driver)


@caught_by("test_a_forked_child_is_refused_and_harms_nothing")
class DropInForkShutsSocketsOfParent(LoopbackTransport):
    def __del__(self) -> None:
        if os.getpid() != self._pid:
            _shut_down(self)


@caught_by("test_close_gives_threads_and_descriptors_back")
class KeepsASocket(LoopbackTransport):
    kept: list[socket.socket] = []  # noqa: RUF012 - the fault

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        self.kept.append(self._peers[peer].channel.socket.dup())
        return peer


@replaces("close", "test_close_gives_threads_and_descriptors_back")
def keeps_a_thread(driver: LoopbackTransport) -> None:
    threading.Thread(target=threading.Event().wait, args=(20,), daemon=True).start()
    LoopbackTransport.close(driver)


@caught_by("test_every_thread_enters")
class ThreadWithoutEnter(LoopbackTransport):
    """The threads that move bytes do not call ``enter``, so that they are on device 0."""

    def __init__(self, *, enter: EnterThread = enter_nothing, **options: Any) -> None:
        super().__init__(enter=enter, **options)
        self._workers = WorkerPool(self.name, 1, enter_nothing)


class NoLocks(_IdentityLocks):
    """Locks that exclude nobody."""

    @contextlib.contextmanager
    def locked(self, identity: Hashable) -> Iterator[None]:
        del identity
        yield


@caught_by("test_connecting_during_a_disconnect_gives_a_live_peer")
class ConnectsToAPeerThatIsDisconnected(LoopbackTransport):
    """``connect`` during ``disconnect`` of a peer returns the id that ``disconnect`` ends."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._identity_locks = NoLocks()
