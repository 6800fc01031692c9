"""Faults of close, of use after close, and of forks."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from kvferry.core.errors import TransportUsageError
from kvferry.core.transport import EnterThread, Notification, PeerId, enter_nothing
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.drivers.loopback.registry import RegionRegistry
from kvferry.drivers.loopback.worker_pool import WorkerPool
from tests.long.drivers.planted.base import caught_by


@caught_by("test_close_twice")
class ClosesOnce(LoopbackTransport):
    """The second ``close`` raises."""

    def close(self) -> None:
        self._check_usable()
        super().close()


@caught_by("test_after_close_every_method_but_close_refuses")
class AnswersAfterClose(LoopbackTransport):
    """After ``close``, ``notifications`` returns none and does not raise."""

    def notifications(self) -> list[Notification]:
        return [] if self._closed else super().notifications()


@caught_by("test_after_close_the_properties_go_on_answering")
class RaisesForLibraryAfterClose(LoopbackTransport):
    """After ``close``, ``library`` raises because the library is gone."""

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


@caught_by("test_a_forked_child_is_refused_and_harms_nothing")
class IgnoresFork(LoopbackTransport):
    """A forked child may use the transport of its parent."""

    def _check_usable(self) -> None:
        if self._closed:
            raise TransportUsageError("closed")


@caught_by("test_what_a_transport_had_registered_is_out_of_reach_once_it_is_closed")
class StaysReadableAfterClose(LoopbackTransport):
    """``close`` leaves the memory registered."""

    def close(self) -> None:
        self._registry = RegionRegistry()
        super().close()


def _shut_down(transport: LoopbackTransport) -> None:
    for peer in transport._peers.values():
        peer.channel.socket.shutdown(socket.SHUT_RDWR)


@caught_by("test_a_forked_child_is_refused_and_harms_nothing")
class CloseInForkShutsSocketsOfParent(LoopbackTransport):
    """``close`` in a forked child shuts the parent's sockets down."""

    def close(self) -> None:
        if os.getpid() != self._pid:
            _shut_down(self)
        super().close()


@caught_by("test_a_forked_child_is_refused_and_harms_nothing")
class DropInForkShutsSocketsOfParent(LoopbackTransport):
    """A forked child that only drops the transport shuts the parent's sockets down."""

    def __del__(self) -> None:
        if os.getpid() != self._pid:
            _shut_down(self)


@caught_by("test_close_gives_threads_and_descriptors_back")
class KeepsASocket(LoopbackTransport):
    """``close`` leaves one of the sockets open."""

    kept: list[socket.socket] = []  # noqa: RUF012 - the fault

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        self.kept.append(self._peers[peer].channel.socket.dup())
        return peer


@caught_by("test_close_gives_threads_and_descriptors_back")
class KeepsAThread(LoopbackTransport):
    """``close`` leaves a thread that waits for work."""

    def close(self) -> None:
        threading.Thread(target=threading.Event().wait, args=(20,), daemon=True).start()
        super().close()


@caught_by("test_every_thread_enters")
class ThreadWithoutEnter(LoopbackTransport):
    """The threads that move bytes do not call ``enter``, so that they are on device 0."""

    def __init__(self, *, enter: EnterThread = enter_nothing, **options: Any) -> None:
        super().__init__(enter=enter, **options)
        self._workers = WorkerPool(self.name, 1, enter_nothing)
