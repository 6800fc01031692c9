"""Faults of notifications: sent early, twice, altered, or to another peer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from kvferry.core.transport import Notification, PeerId, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from tests.long.drivers.planted.base import (
    OtherCapabilities,
    Read,
    caught_by,
    cut,
    plant,
    replaces,
)

taken = LoopbackTransport.notifications


@replaces("altered", "test_a_bound_one_does_not_overtake_a_long_transfer")
def notifies_with_the_first_part(driver: LoopbackTransport, read: Read) -> Read:
    peer, copies, notify = read
    first = copies.segments[0].stop if copies.segments else 0
    if notify is None or not 0 < first < len(copies):
        return read
    LoopbackTransport.read(driver, peer, cut(copies, slice(first)), notify)
    return read._replace(notify=None)


@replaces("altered", "test_other_lengths_are_refused_and_nothing_has_moved")
def checks_payload_last(driver: LoopbackTransport, read: Read) -> Read:
    if read.notify is not None:
        LoopbackTransport.read(driver, read.peer, read.copies)
    return read


plant(
    "altered",
    {
        "test_a_bound_one_comes_with_every_transfer": {
            "drops_notification_of_empty_transfer": lambda _, read: read._replace(
                notify=read.notify if read.copies.total else None
            )
        },
        "test_other_lengths_are_refused_and_nothing_has_moved": {
            "drops_empty_notifications": lambda _, read: read._replace(notify=read.notify or None)
        },
    },
)
plant(
    "notifications",
    {
        "test_each_arrives_once_in_order_and_says_from_whom": {
            "reverses_notifications": lambda driver: taken(driver)[::-1],
            "names_the_receiver_as_sender": lambda driver: [
                replace(one, sender=driver.name) for one in taken(driver)
            ],
        },
        "test_from_1_byte_to_the_limit": {
            "cuts_payloads_at_a_zero": lambda driver: [
                replace(one, payload=one.payload.split(b"\0")[0]) for one in taken(driver)
            ]
        },
    },
)


@caught_by("test_each_arrives_once_in_order_and_says_from_whom")
class DeliversNotificationsTwice(LoopbackTransport):
    def notifications(self) -> list[Notification]:
        fresh = super().notifications()
        again, self._again = getattr(self, "_again", []), fresh
        return again + fresh


@caught_by("test_other_lengths_are_refused_and_nothing_has_moved")
class ExceedsMaxNotification(OtherCapabilities):
    """A payload one byte longer than ``max_notification`` is sent."""

    can: ClassVar = {"max_notification": 100}


@caught_by("test_senders_are_told_apart")
class NamesTheFirstSender(LoopbackTransport):
    def notifications(self) -> list[Notification]:
        found = super().notifications()
        if found and not hasattr(self, "_first"):
            self._first = found[0].sender
        return [replace(one, sender=self._first) for one in found]


@replaces("read", "test_only_the_peer_that_is_named_gets_it")
def notifies_the_newest_peer(
    driver: LoopbackTransport, peer: PeerId, copies: Copies, notify: bytes | None = None
) -> TransferId:
    driver._find_peer(peer)
    newest = max(driver._peers)
    if notify is None or newest == peer:
        return LoopbackTransport.read(driver, peer, copies, notify)
    transfer = LoopbackTransport.read(driver, peer, copies)
    driver.notify(newest, notify)
    return transfer


class BindsItself(LoopbackTransport):
    """Base class: sends bound notifications itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._unsaid: dict[TransferId, tuple[PeerId, bytes]] = {}

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        if notify is not None and not self._find_transfer(transfer).final:
            self._unsaid[transfer] = (peer, notify)
        return transfer


@caught_by("test_cancel_ends_a_transfer_early")
class NotifiesWhenTheTransferFails(BindsItself):
    def cancel(self, transfer: TransferId) -> None:
        super().cancel(transfer)
        if transfer in self._unsaid:
            self.notify(*self._unsaid.pop(transfer))


@caught_by("test_disconnect_fails_what_is_in_flight")
class DisconnectSendsBoundNotifications(BindsItself):
    def disconnect(self, peer: PeerId) -> None:
        self._find_peer(peer)
        for other, payload in self._unsaid.values():
            if other == peer:
                self.notify(peer, payload)
        super().disconnect(peer)


@caught_by("test_quiet_after_close")
class CloseSendsBoundNotifications(BindsItself):
    def close(self) -> None:
        for peer, payload in self._unsaid.values():
            if peer in self._peers:
                self.notify(peer, payload)
        self._unsaid.clear()
        super().close()


@caught_by("test_quiet_after_a_failure")
class FailureSendsBoundNotification(BindsItself):
    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        statuses = super().poll(transfers)
        for transfer, status in zip(transfers, statuses, strict=True):
            if status.state is State.FAILED and transfer in self._unsaid:
                self.notify(*self._unsaid.pop(transfer))
        return statuses


@replaces("notify", "test_what_a_stopped_peer_was_sent_arrives_whole_and_in_order")
def notify_waits_for_the_peer(driver: LoopbackTransport, peer: PeerId, payload: bytes) -> None:
    LoopbackTransport.notify(driver, peer, payload)
    channel, until = driver._peers[peer].channel, time.monotonic() + 3
    while channel._queue and time.monotonic() < until:
        time.sleep(0.001)
