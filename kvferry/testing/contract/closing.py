"""Tests of ``close``, of calls after it and in a forked child, and of a transport's threads."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from kvferry.core.transport import PeerId, State, Transport
from kvferry.core.transport.threads import takes_enter
from kvferry.testing.contract.copy_batches import batch
from kvferry.testing.contract.workbench import MIB, ContractSettings, Workbench, refused
from kvferry.testing.memory import imported, thread_setup
from kvferry.testing.peer_process import calls
from kvferry.testing.peers import Process

_FIRST, _MORE = 2, 6


class ClosingTests(ContractSettings):
    """Tests of ``close``, of calls after ``close``, and of calls in a forked child."""

    def test_after_close_every_method_but_close_refuses(
        self, lab: Workbench, shared: Process
    ) -> None:
        """A second ``close`` does nothing, and the properties go on answering."""
        transport = lab.make()
        before = (transport.name, transport.capabilities)
        region = lab.buffer(MIB, transport).region
        peer = transport.connect(shared.address())
        copies = batch(region, shared.region, [0], [0], [MIB])
        transfer = transport.read(peer, copies)
        lab.wait_for(lambda: transport.poll([transfer])[0].state.final, "a transfer has not ended")
        transport.close()
        for call in calls(transport, region, peer, copies).values():
            refused(call)
        refused(transport.poll, [transfer])
        refused(transport.cancel, transfer)
        refused(transport.forget, transfer)
        assert (transport.name, transport.capabilities) == before
        assert isinstance(transport.library, str)
        transport.close()

    def test_close_gives_threads_and_descriptors_back(self, lab: Workbench) -> None:
        """The driver's library may keep what the first transports add, until the process ends."""
        counts: list[int] = []
        for index in range(_FIRST + _MORE):
            transport = lab.make()
            transport.register(lab.mine.region)
            transport.connect(lab.transport.address())
            lab.transport.disconnect(lab.transport.connect(transport.address()))
            transport.close()
            if index == _FIRST - 1:
                lab.until(lambda: False, 0.1)
                counts = _held()
        back = lab.until(lambda: all(_held()[kind] < counts[kind] + _MORE for kind in (0, 1)), 5.0)
        assert back, (
            f"from {counts} descriptors and threads to {_held()}, {_MORE} transports and 5 s later"
        )

    def test_closing_one_leaves_others_alone(self, lab: Workbench, shared: Process) -> None:
        other = lab.make()
        other.connect(shared.address())
        other.connect(lab.transport.address())
        lab.connect(other)
        other.close()
        lab.works(shared)

    def test_what_a_transport_had_registered_is_out_of_reach_once_it_is_closed(
        self, lab: Workbench
    ) -> None:
        """A read of it fails, and no byte of its target changes. What was DONE stays DONE."""
        neighbour = lab.neighbour()
        peer = lab.connect(neighbour)
        copies = lab.whole(neighbour)
        done = lab.transport.read(peer, copies)
        assert lab.known(done).state is State.DONE
        neighbour.transport.close()
        assert lab.state(done) is State.DONE
        before = lab.mine.get()
        neighbour.put(lab.fresh())
        status = lab.settled(lab.transport.read(peer, copies), peer)
        assert status.state is State.FAILED, "it has reached memory of a closed transport"
        np.testing.assert_array_equal(lab.mine.get(), before)

    def test_a_forked_child_is_refused_and_harms_nothing(
        self, lab: Workbench, process: Process
    ) -> None:
        """There every method but ``close`` raises; transfers work afterwards, both ways."""
        peer = process.connect(lab.transport.address())
        copies = batch(process.region, lab.mine.region, [0], [0], [MIB])
        back = lab.connect(process)
        self._moves_and_notifies(lab, process, peer, back)
        assert process.fork(peer, copies) == []
        self._moves_and_notifies(lab, process, peer, back)
        lab.works(process)

    @staticmethod
    def _moves_and_notifies(lab: Workbench, process: Process, there: PeerId, back: PeerId) -> None:
        process.begin(there, batch(process.region, lab.mine.region, [0], [0], [MIB]))
        lab.done_there(process)
        if lab.notifies:
            process.notify(there, [lab.payload(1)])
            assert [one.payload for one in lab.receive(lab.transport, 1)] == [lab.payload(1)]
            lab.transport.notify(back, lab.payload(2))
            assert [one.payload for one in lab.received_by(process, 1)] == [lab.payload(2)]


def _held() -> list[int]:
    """Return how many file descriptors and how many threads this process has, in this order."""
    return [len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("fd", "task")]


_COPIES = 64


class ThreadTests(ContractSettings):
    """Tests of the threads that a transport makes in Python."""

    def test_every_thread_enters(
        self, lab: Workbench, shared: Process, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those in Python: each calls ``enter`` once. A driver that does not take it makes none."""
        make = imported(lab.settings.factory)
        takes = takes_enter(make)
        entered: list[threading.Thread] = []
        started: list[threading.Thread] = []
        start, choose_device = threading.Thread.start, thread_setup(lab.settings.memory)

        def recorded(thread: threading.Thread) -> None:
            started.append(thread)
            start(thread)

        def enter() -> None:
            entered.append(threading.current_thread())
            choose_device()

        monkeypatch.setattr(threading.Thread, "start", recorded)
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


def _use(lab: Workbench, transport: Transport, remote: Process) -> None:
    """Connect to a peer, move 64 MiB and send a notification: all that may need a thread."""
    buffer = lab.buffer(MIB, transport)
    peer = transport.connect(remote.address())
    zeros = np.zeros(_COPIES, np.uint64)
    copies = batch(buffer.region, remote.region, zeros, zeros, zeros + np.uint64(MIB))
    for _ in range(2):
        transfer = transport.read(peer, copies, lab.bound())
        lab.wait_for(
            lambda one=transfer: transport.poll([one])[0].state is State.DONE,  # type: ignore[misc]
            "a transfer is not DONE",
        )
    transport.disconnect(peer)
