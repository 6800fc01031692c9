"""Faults when peers die."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from kvferry.core.errors import TransportError
from kvferry.core.transport import PeerId, Quiescence, State, Status, TransferId
from kvferry.core.transport.copies import Copies
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback.peer_memory import OtherProcess
from kvferry.drivers.loopback.worker_pool import ChunkedTransfer
from tests.long.drivers.planted.base import DONE, PENDING, OtherCapabilities, Watched, caught_by


@caught_by("test_killed_before_a_transfer")
class RaisesFromPoll(LoopbackTransport):
    """``poll`` raises for a failed transfer."""

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        statuses = super().poll(transfers)
        for status in statuses:
            if status.error is not None:
                raise status.error
        return statuses


@caught_by("test_killed_before_a_transfer")
class ReadRaisesForALostPeer(LoopbackTransport):
    """``read`` raises if the peer is gone."""

    def read(self, peer: PeerId, copies: Copies, notify: bytes | None = None) -> TransferId:
        transfer = super().read(peer, copies, notify)
        (status,) = super().poll([transfer])
        if status.error is not None:
            raise status.error
        return transfer


@caught_by("test_killed_before_a_transfer")
class NotifyRaisesForALostPeer(LoopbackTransport):
    """``notify`` raises if the peer is gone."""

    def notify(self, peer: PeerId, payload: bytes) -> None:
        super().notify(peer, payload)
        if self._peers[peer].channel.lost:
            raise TransportError("nobody hears this")


@caught_by("test_killed_before_a_transfer")
class NotifyRefusesAKnownDeadPeer(LoopbackTransport):
    """``notify`` raises once it is known that the peer is gone."""

    def notify(self, peer: PeerId, payload: bytes) -> None:
        jobs = [job for owner, _, job in self._transfers.values() if owner == peer]
        if any(job.status.state is State.FAILED for job in jobs):
            raise TransportError("the peer is gone")
        super().notify(peer, payload)


@caught_by("test_killed_before_a_transfer")
class FailedWithoutError(Watched):
    """A failed transfer has no error."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        return replace(status, error=None)


@caught_by("test_killed_during_a_transfer")
class IgnoresDeath(Watched):
    """A transfer with a dead peer is PENDING for ever."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        return PENDING if status.state is State.FAILED else status


@caught_by("test_killed_during_a_transfer")
class DeathMeansDone(Watched):
    """A transfer with a dead peer is DONE."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        return DONE if status.state is State.FAILED else status


@caught_by("test_killed_with_many_transfers_in_flight")
class DeathFailsOnlyOneTransfer(Watched):
    """Only the first transfer with a dead peer fails."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        others = [
            one
            for one, (_, _, job) in self._transfers.items()
            if isinstance(job, ChunkedTransfer) and job.stop and one < transfer
        ]
        return PENDING if others else status


@caught_by("test_killed_during_a_transfer")
class FailingForEver(Watched):
    """A failing transfer never becomes FAILED, although quiescence is promised."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        return replace(status, state=State.FAILING) if status.error is not None else status


@caught_by("test_killed_during_a_transfer")
class FailingAfterDisconnect(OtherCapabilities, FailingForEver):
    """A failing transfer does not become FAILED after ``disconnect``, as promised."""

    can: ClassVar = {"quiescence": Quiescence.AFTER_DISCONNECT}


@caught_by("test_gone_and_back_is_another_peer")
class MistakesARestartedPeerForTheFormer(LoopbackTransport):
    """A restarted peer is taken for the former one."""

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        first = min(self._peers)
        self._peers[first] = self._peers[peer]
        return first


@caught_by("test_killed_before_a_transfer")
class FailedWithEmptyError(Watched):
    """A failed transfer has an error without text."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        return replace(status, error=TransportError()) if status.error is not None else status


@caught_by("test_killed_while_a_fork_lives_on")
class DetectsDeathBySocketOnly(Watched):
    """Death is detected by the end of a socket, which a fork of the peer keeps open."""

    def seen(self, transfer: TransferId, status: Status) -> Status:
        peer = self._peers.get(self._transfers[transfer].peer)
        if status.state is not State.FAILED or peer is None or peer.channel.lost:
            return status
        try:
            peer.channel.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return PENDING
        except OSError:
            return status
        return status


@caught_by("test_a_stopped_peer_ends_by_the_deadline")
class PollWaitsForThePeer(LoopbackTransport):
    """``poll`` waits for an answer of the peer."""

    def poll(self, transfers: Sequence[TransferId]) -> list[Status]:
        for peer in self._peers.values():
            if isinstance(peer.memory, OtherProcess) and transfers:
                stat = Path(f"/proc/{peer.memory.pid}/stat").read_text()
                if stat.rpartition(")")[2].split()[0] == "T":
                    time.sleep(0.1)
        return super().poll(transfers)
