"""Tests of the threads that a transport makes: each calls ``enter`` first."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvferry.core.transport import Transport
from kvferry.core.transport.threads import takes_enter
from kvferry.testing.contract.copy_batches import batch
from kvferry.testing.contract.workbench import MIB, ContractSettings, Workbench
from kvferry.testing.memory import imported, thread_setup
from kvferry.testing.peers import Process

_COPIES = 64


class ThreadTests(ContractSettings):
    """Tests of the threads that a transport makes in Python."""

    def test_every_thread_enters(
        self, lab: Workbench, shared: Process, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every thread that the transport makes in Python calls ``enter``, and does so once.

        A driver that does not take ``enter`` makes no such threads.
        """
        make = imported(lab.settings.factory)
        takes = takes_enter(make)
        entered: list[threading.Thread] = []
        started = _record_threads(monkeypatch)
        choose_device = thread_setup(lab.settings.memory)

        def enter() -> None:
            entered.append(threading.current_thread())
            choose_device()

        given = {"enter": enter} if takes else {}
        transport: Transport = make(**lab.settings.options, **given)
        try:
            _use(lab, transport, shared)
            if not takes:
                names = [one.name for one in started]
                assert not started, f"threads {names}, and no enter to call in them"
                return
            without = [one.name for one in started if one not in entered]
            assert not without, f"threads that have not called enter: {without}"
            assert len(entered) == len(set(entered)), "a thread has called enter twice"
        finally:
            transport.close()


def _record_threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Return the list to which every thread is added that starts from now on."""
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def recorded(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", recorded)
    return started


def _use(lab: Workbench, transport: Transport, remote: Process) -> None:
    """Connect to a peer, move 64 MiB and send a notification: all that may need a thread."""
    buffer = lab.buffer(MIB, transport)
    peer = transport.connect(remote.address())
    zeros = np.zeros(_COPIES, np.uint64)
    copies = batch(buffer.region, remote.region, zeros, zeros, zeros + np.uint64(MIB))
    for _ in range(2):
        lab.finish(transport.read(peer, copies, lab.bound()), transport)
    transport.disconnect(peer)
