"""Faults while transfers run, and of their outcomes."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvferry.core.errors import PeerLostError, TransportError
from kvferry.core.memory import Region
from kvferry.core.transport import Notification, PeerId, Status, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback.worker_pool import ChunkedTransfer
from tests.long.drivers.correct_drivers import FailingUntilDisconnect
from tests.long.drivers.planted.base import (
    PENDING,
    KnowsCancelled,
    Watched,
    caught_by,
    failed,
    replaces,
)
from tests.long.drivers.planted.batches import KeepsArraysUntilPoll


@replaces("poll", "test_poll_answers_in_the_order_of_the_ids")
def poll_ignores_order_of_ids(
    driver: LoopbackTransport, transfers: Sequence[TransferId]
) -> list[Status]:
    """``poll`` returns statuses in the order in which transfers began, each once."""
    return LoopbackTransport.poll(driver, sorted(transfers, reverse=True))


@caught_by("test_done_stays_until_it_is_forgotten")
class ReusesTransferIds(LoopbackTransport):
    def forget(self, transfer: TransferId) -> None:
        super().forget(transfer)
        self._ids = iter([transfer, *range(transfer + 1, transfer + 10_000)])  # type: ignore[assignment]


@replaces("seen", "test_done_stays_until_it_is_forgotten")
def disconnect_fails_done_transfers(
    driver: Watched, transfer: TransferId, status: Status
) -> Status:
    peer = driver._transfers[transfer].peer
    return status if peer in driver._peers else failed("disconnected")


@replaces("poll", "test_done_stays_until_it_is_forgotten")
def forgets_done_transfers(
    driver: LoopbackTransport, transfers: Sequence[TransferId]
) -> list[Status]:
    statuses = LoopbackTransport.poll(driver, transfers)
    for transfer, status in zip(transfers, statuses, strict=True):
        if status.state.final and transfer in driver._transfers:
            driver.forget(transfer)
    return statuses


@replaces("forget", "test_only_final_transfers_can_be_forgotten")
def forgets_running_transfers(driver: LoopbackTransport, transfer: TransferId) -> None:
    if driver._find_transfer(transfer).final:
        LoopbackTransport.forget(driver, transfer)


@replaces("poll", "test_poll_does_not_block")
def poll_blocks(driver: LoopbackTransport, transfers: Sequence[TransferId]) -> list[Status]:
    end = time.monotonic() + 0.06
    while time.monotonic() < end and driver._unfinished():
        time.sleep(0.001)
    return LoopbackTransport.poll(driver, transfers)


@caught_by("test_calls_may_come_from_different_threads")
class RefusesOtherThreads(LoopbackTransport):
    def __init__(self, **options: Any) -> None:
        self._thread = threading.get_ident()
        super().__init__(**options)

    def _check_usable(self) -> None:
        super()._check_usable()
        if self._thread != threading.get_ident():
            raise TransportError("called from another thread")


@caught_by("test_transfers_go_on_without_calls")
class ProgressesOnlyInPoll(KeepsArraysUntilPoll):
    """It declares background progress, but transfers begin only in ``poll``."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        own = (getattr(copies, name).copy() for name in ("local", "remote", "nbytes"))
        local, remote, nbytes = own
        return super().read(
            peer, replace(copies, local=local, remote=remote, nbytes=nbytes), notify
        )


@replaces("read", "test_long_calls_release_the_interpreter")
def holds_the_interpreter_lock(
    driver: LoopbackTransport, peer: PeerId, copies: Copies, notify: bytes | None = None
) -> TransferId:
    transfer = LoopbackTransport.read(driver, peer, copies, notify)
    if copies.total > 1 << 30:
        ctypes.PyDLL(None).usleep(900_000)
    return transfer


@replaces("notifications", "test_notifications_does_not_block")
def notifications_blocks(driver: LoopbackTransport) -> list[Notification]:
    found = LoopbackTransport.notifications(driver)
    if not found:
        time.sleep(0.1)
    return found


@caught_by("test_a_batch_moves_its_bytes_and_no_others")
class DoneBecomesPending(Watched):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._told: set[TransferId] = set()

    def seen(self, transfer: TransferId, status: Status) -> Status:
        if transfer in self._told:
            return PENDING
        if status.state.final:
            self._told.add(transfer)
        return status


@replaces("cancel", "test_cancel_ends_a_transfer_early")
def claims_to_cancel(driver: LoopbackTransport, transfer: TransferId) -> None:
    driver._find_transfer(transfer)


@replaces("wake_when_ended", "test_the_end_of_a_transfer_wakes_the_caller")
def claims_to_wake(driver: LoopbackTransport, wake: Callable[[], None]) -> bool:
    return True


@caught_by("test_quiet_after_a_cancel")
class CancelledIsFinalBeforeQuiet(KnowsCancelled):
    """A cancelled transfer is FAILED at once and still moves bytes."""

    def cancel(self, transfer: TransferId) -> None:
        self._find_transfer(transfer)
        self._cancelled.add(transfer)

    def seen(self, transfer: TransferId, status: Status) -> Status:
        return failed("cancelled") if transfer in self._cancelled else status


@caught_by("test_quiet_after_disconnect")
class DisconnectDoesNotWait(Watched):
    """``disconnect`` forgets the peer while its transfers go on."""

    def disconnect(self, peer: PeerId) -> None:
        self._check_usable()
        self._find_peer(peer)
        del self._peers[peer]

    def seen(self, transfer: TransferId, status: Status) -> Status:
        peer = self._transfers[transfer].peer
        return status if peer in self._peers or status.state.final else failed("disconnected")


@replaces("disconnect", "test_disconnect_leaves_other_peers_alone")
def disconnects_all_peers(driver: LoopbackTransport, peer: PeerId) -> None:
    LoopbackTransport.disconnect(driver, peer)
    for other in list(driver._peers):
        LoopbackTransport.disconnect(driver, other)


@caught_by("test_cancel_leaves_other_transfers_alone")
class CancelsLaterTransfers(LoopbackTransport):
    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        job = self._find_transfer(transfer)
        if isinstance(job, ChunkedTransfer):
            job.limit = 1 << 12
        return transfer

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        return [
            failed("cancelled") if getattr(self, "_any", False) else status
            for status in super().poll(transfers)
        ]

    def cancel(self, transfer: TransferId) -> None:
        super().cancel(transfer)
        self._any = True


@caught_by("test_quiet_after_close")
class CloseDoesNotWait(LoopbackTransport):
    """``close`` leaves transfers running; a second ``close`` ends them before memory is freed."""

    def close(self) -> None:
        if self._closed:
            self._closed = False
            super().close()
        self._closed = True


@replaces("seen", "test_disconnect_fails_what_is_in_flight")
def disconnect_reports_other_error(driver: Watched, transfer: TransferId, status: Status) -> Status:
    lost = isinstance(status.error, PeerLostError)
    return replace(status, error=TransportError("it failed")) if lost else status


@caught_by("test_killed_before_a_transfer")
class DeregistersMemoryOfFailingTransfer(FailingUntilDisconnect):
    def deregister(self, region: Region) -> None:
        LoopbackTransport.deregister(self, region)


@caught_by("test_killed_before_a_transfer")
class ForgetsFailingTransfer(FailingUntilDisconnect):
    def forget(self, transfer: TransferId) -> None:
        LoopbackTransport.forget(self, transfer)


@replaces("cancel", "test_cancel_does_not_wait_for_the_end")
def cancel_waits_for_the_end(driver: LoopbackTransport, transfer: TransferId) -> None:
    running = not driver._find_transfer(transfer).final
    LoopbackTransport.cancel(driver, transfer)
    if running:
        time.sleep(0.5)


@caught_by("test_a_stopped_peer_that_is_disconnected_holds_nobody_up")
class DisconnectBlocksAllTransfers(LoopbackTransport):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._lock = threading.Lock()

    def disconnect(self, peer: PeerId) -> None:
        with self._lock:
            time.sleep(2.0)
            super().disconnect(peer)

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        with self._lock:
            return super().read(peer, copies, notify)


@replaces("connect", "test_peers_come_and_go_beside_transfers")
def connect_iterates_without_lock(driver: LoopbackTransport, address: bytes) -> PeerId:
    for _ in range(20):  # so long that other threads do change them, on a busy machine too
        for _ in driver._transfers:
            time.sleep(0.001)
        time.sleep(0.01)
    return LoopbackTransport.connect(driver, address)


@caught_by("test_any_order_of_calls_does_what_the_model_does")
class DeregistersARegionOnlyOnce(LoopbackTransport):
    """A region that was deregistered and registered again cannot be deregistered again."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._once: set[Region] = set()

    def deregister(self, region: Region) -> None:
        if region in self._once:
            return
        super().deregister(region)
        self._once.add(region)


@caught_by("test_any_order_of_calls_does_what_the_model_does")
class LosesANotificationAfterReconnecting(LoopbackTransport):
    """The first free notification on a second connection is lost."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._ended = 0

    def disconnect(self, peer: PeerId) -> None:
        super().disconnect(peer)
        self._ended = 1

    def notify(self, peer: PeerId, payload: bytes) -> None:
        self._find_peer(peer)
        if self._ended == 1:
            self._ended = 2
            return
        super().notify(peer, payload)
