"""Faults of ``poll``, ``forget`` and the outcomes of transfers."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvferry.core.errors import TransportError, TransportUsageError
from kvferry.core.transport import Notification, PeerId, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from tests.long.drivers.planted.base import (
    PENDING,
    KnowsCancelled,
    Watched,
    caught_by,
    failed,
    transfer_of,
)
from tests.long.drivers.planted.transfers import KeepsArraysUntilPoll


@caught_by("test_poll_answers_in_the_order_of_the_ids")
class PollIgnoresOrderOfIds(LoopbackTransport):
    """``poll`` returns statuses in the order in which transfers began, each once."""

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        return super().poll(sorted(transfers, reverse=True))


@caught_by("test_ids_are_not_used_again")
class ReusesTransferIds(LoopbackTransport):
    """The id of a forgotten transfer is given to the next one."""

    def forget(self, transfer: TransferId) -> None:
        super().forget(transfer)
        self._ids = iter([transfer, *range(transfer + 1, transfer + 10_000)])  # type: ignore[assignment]


@caught_by("test_done_stays_until_it_is_forgotten")
class DisconnectFailsDoneTransfers(Watched):
    """A transfer that was DONE is FAILED once its peer is disconnected."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        peer = self._transfers[transfer].peer
        return status if peer in self._peers else failed("disconnected")


@caught_by("test_done_stays_until_it_is_forgotten")
class ForgetsDoneTransfers(LoopbackTransport):
    """A transfer is forgotten once ``poll`` has reported its end."""

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        statuses = super().poll(transfers)
        for transfer, status in zip(transfers, statuses, strict=True):
            if status.state.final and transfer in self._transfers:
                self.forget(transfer)
        return statuses


@caught_by("test_only_final_transfers_can_be_forgotten")
class ForgetsRunningTransfers(LoopbackTransport):
    """A transfer in flight can be forgotten."""

    def forget(self, transfer: TransferId) -> None:
        if transfer_of(self, transfer).final:
            super().forget(transfer)


@caught_by("test_poll_does_not_block")
class PollBlocks(LoopbackTransport):
    """``poll`` waits a while for the end of a transfer."""

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        self._workers.wait_final(
            [transfer_of(self, one) for one in transfers], time.monotonic() + 0.06
        )
        return super().poll(transfers)


@caught_by("test_calls_may_come_from_different_threads")
class RefusesOtherThreads(LoopbackTransport):
    """Only the thread that made the transport may call it."""

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


@caught_by("test_long_calls_release_the_interpreter")
class HoldsTheInterpreterLock(LoopbackTransport):
    """``read`` holds the interpreter lock for long."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        if copies.total > 1 << 30:
            ctypes.PyDLL(None).usleep(900_000)
        return transfer


@caught_by("test_notifications_does_not_block")
class NotificationsBlocks(LoopbackTransport):
    """``notifications`` waits a while for a notification."""

    def notifications(self) -> list[Notification]:
        found = super().notifications()
        if not found:
            time.sleep(0.1)
        return found


@caught_by("test_poll_answers_in_the_order_of_the_ids")
class PollAcceptsListsOnly(LoopbackTransport):
    """``poll`` refuses a sequence of ids that is not a list."""

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        if not isinstance(transfers, list):
            raise TransportUsageError("not a list")
        return super().poll(transfers)


@caught_by("test_done_stays_until_it_is_forgotten")
class CancelFailsDoneTransfers(KnowsCancelled):
    """A transfer that is cancelled after it was DONE is FAILED."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        undone = transfer in self._cancelled and status.state is State.DONE
        return failed("cancelled") if undone else status


@caught_by("test_one_copy")
class DoneBecomesPending(Watched):
    """A transfer that was DONE is PENDING at the next poll."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._told: set[TransferId] = set()

    def seen(self, transfer: TransferId, status: Status) -> Status:
        if transfer in self._told:
            return PENDING
        if status.state.final:
            self._told.add(transfer)
        return status
