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
    caught_by,
    connection_of,
    cut,
    transfer_of,
)


@caught_by("test_a_bound_one_does_not_overtake_a_long_transfer")
class NotifiesWithTheFirstPart(LoopbackTransport):
    """A transfer is split in two, and its notification is sent with the first part."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        first = copies.segments[0].stop if copies.segments else 0
        if notify is not None and 0 < first < len(copies):
            super().read(peer, cut(copies, slice(first)), notify)
            notify = None
        return super().read(peer, copies, notify)


@caught_by("test_a_bound_one_comes_with_every_transfer")
class DropsNotificationOfEmptyTransfer(LoopbackTransport):
    """The notification of a transfer without bytes is not sent."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return super().read(peer, copies, notify if copies.total else None)


@caught_by("test_each_arrives_once_in_order_and_says_from_whom")
class ReversesNotifications(LoopbackTransport):
    """``notifications`` returns the newest first."""

    def notifications(self) -> list[Notification]:
        return super().notifications()[::-1]


@caught_by("test_each_arrives_once_in_order_and_says_from_whom")
class DeliversNotificationsTwice(LoopbackTransport):
    """``notifications`` returns every notification twice."""

    def notifications(self) -> list[Notification]:
        fresh = super().notifications()
        again, self._again = getattr(self, "_again", []), fresh
        return again + fresh


@caught_by("test_each_arrives_once_in_order_and_says_from_whom")
class NamesTheReceiverAsSender(LoopbackTransport):
    """The sender of a notification is named as the transport that received it."""

    def notifications(self) -> list[Notification]:
        return [replace(one, sender=self.name) for one in super().notifications()]


@caught_by("test_from_1_byte_to_the_limit")
class CutsPayloadsAtAZero(LoopbackTransport):
    """A payload is taken for a C string."""

    def notifications(self) -> list[Notification]:
        return [
            replace(one, payload=one.payload.split(b"\0")[0]) for one in super().notifications()
        ]


@caught_by("test_other_lengths_are_refused_and_nothing_has_moved")
class DropsEmptyNotifications(LoopbackTransport):
    """An empty notification is accepted and not sent."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        return super().read(peer, copies, notify or None)


@caught_by("test_other_lengths_are_refused_and_nothing_has_moved")
class ExceedsMaxNotification(OtherCapabilities):
    """A payload one byte longer than ``max_notification`` is sent."""

    can: ClassVar = {"max_notification": 100}


@caught_by("test_other_lengths_are_refused_and_nothing_has_moved")
class ChecksPayloadLast(LoopbackTransport):
    """A transfer whose notification is refused moves its bytes first."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        if notify is not None:
            super().read(peer, copies)
        return super().read(peer, copies, notify)


@caught_by("test_senders_are_told_apart")
class NamesTheFirstSender(LoopbackTransport):
    """Every notification names the first sender."""

    def notifications(self) -> list[Notification]:
        found = super().notifications()
        if found and not hasattr(self, "_first"):
            self._first = found[0].sender
        return [replace(one, sender=self._first) for one in found]


@caught_by("test_only_the_peer_that_is_named_gets_it")
class NotifiesTheNewestPeer(LoopbackTransport):
    """A bound notification is sent to the peer that was connected last."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        connection_of(self, peer)
        newest = max(self._peers)
        if notify is None or newest == peer:
            return super().read(peer, copies, notify)
        transfer = super().read(peer, copies)
        self.notify(newest, notify)
        return transfer


class BindsItself(LoopbackTransport):
    """Base class: sends bound notifications itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._unsaid: dict[TransferId, tuple[PeerId, bytes]] = {}

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        if notify is not None and not transfer_of(self, transfer).final:
            self._unsaid[transfer] = (peer, notify)
        return transfer


@caught_by("test_cancel_ends_a_transfer_early")
class NotifiesWhenTheTransferFails(BindsItself):
    """A bound notification is sent at the end, even if the transfer failed."""

    def cancel(self, transfer: TransferId) -> None:
        super().cancel(transfer)
        if transfer in self._unsaid:
            self.notify(*self._unsaid.pop(transfer))


@caught_by("test_disconnect_fails_what_is_in_flight")
class DisconnectSendsBoundNotifications(BindsItself):
    """``disconnect`` sends the notifications of unfinished transfers."""

    def disconnect(self, peer: PeerId) -> None:
        connection_of(self, peer)
        for other, payload in self._unsaid.values():
            if other == peer:
                self.notify(peer, payload)
        super().disconnect(peer)


@caught_by("test_close_with_work_in_flight")
class CloseSendsBoundNotifications(BindsItself):
    """``close`` sends the notifications of the transfers that it ended."""

    def close(self) -> None:
        for peer, payload in self._unsaid.values():
            if peer in self._peers:
                self.notify(peer, payload)
        self._unsaid.clear()
        super().close()


@caught_by("test_quiet_after_a_failure")
class FailureSendsBoundNotification(BindsItself):
    """A transfer that failed by itself still sends its notification."""

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        statuses = super().poll(transfers)
        for transfer, status in zip(transfers, statuses, strict=True):
            if status.state is State.FAILED and transfer in self._unsaid:
                self.notify(*self._unsaid.pop(transfer))
        return statuses


@caught_by("test_what_a_stopped_peer_was_sent_arrives_whole_and_in_order")
class NotifyWaitsForThePeer(LoopbackTransport):
    """``notify`` returns only when the socket of the peer has taken the notification."""

    def notify(self, peer: PeerId, payload: bytes) -> None:
        super().notify(peer, payload)
        channel, until = self._peers[peer].channel, time.monotonic() + 3
        while channel._queue and time.monotonic() < until:
            time.sleep(0.001)
