"""A driver compared with a model of a driver: calls in any order, and their outcomes.

There are two transports in this process. Each has ``REGIONS`` regions of ``SLOTS`` *slots* of
``SLOT`` bytes each. A transfer copies between pairs of slots, from and to unaligned places within
them. The model has the bytes that each slot must contain once no unfinished transfer uses the slot.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvferry.core.transport import PeerId, State, TransferId, Transport
from kvferry.core.transport.copies import Copies
from kvferry.testing.contract.copy_batches import batch, joined
from kvferry.testing.contract.workbench import ContractSettings, Workbench, refused
from kvferry.testing.memory import Buffer, Bytes, pattern

REGIONS, SLOTS, SLOT = 3, 16, 4096
_STEPS = 40
FREE, BOUND = 0, 1
"""The sorts of notifications: sent with ``notify``, or bound to a transfer."""

Slot = tuple[int, int]
"""The index of a region, and the index of a slot in that region."""

slots = st.tuples(st.integers(0, REGIONS - 1), st.integers(0, SLOTS - 1))
pairs = st.lists(
    st.tuples(slots, slots),
    max_size=6,
    unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
)
"""Strategy of the copies of one transfer: the local and the remote slot of each."""


class StateMachineTests(ContractSettings):
    """Hypothesis chooses sequences of calls, and prints the shortest sequence that fails."""

    examples = 12
    """How many sequences of calls Hypothesis tries."""

    def test_any_order_of_calls_does_what_the_model_does(self) -> None:
        run_state_machine_as_test(
            lambda: DriverMachine(Workbench(self)),  # type: ignore[arg-type] # a function will do
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=_STEPS,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                database=None,
            ),
        )


@dataclass(slots=True, eq=False)
class ModelledTransport:
    """A transport with its buffers, and what the model knows of them."""

    transport: Transport
    buffers: list[Buffer]  # of each region
    model: list[Bytes]  # what they contain, except in slots that unfinished transfers use
    registered: set[int] = field(default_factory=set)  # indices of regions

    def put(self, slot: Slot, content: Bytes) -> None:
        """Overwrite a slot, in memory and in the model."""
        region, index = slot
        self.model[region][index * SLOT : (index + 1) * SLOT] = content
        self.buffers[region].put(content, index * SLOT)


@dataclass(slots=True, eq=False)
class ModelledTransfer:
    """A transfer that is unfinished in the model: no poll has shown a final status yet."""

    pairs: list[tuple[Slot, Slot]]  # the local and the remote slot of each copy
    shift: int  # the offset of each copy in its local slot; in its remote slot it is 64 - shift
    nbytes: int  # of each copy
    notify: bytes | None
    cancelled: bool = False  # or its peer was disconnected: it may be FAILED


class DriverMachine(RuleBasedStateMachine):
    """The calls from which Hypothesis chooses, each with the check of its outcome."""

    def __init__(self, lab: Workbench) -> None:
        super().__init__()
        self.lab = lab
        self.seeds = itertools.count(1)  # of patterns and payloads
        self.here = self._side(lab.transport)
        self.there = self._side(lab.make())
        self.peer: PeerId | None = None  # ``there``, as ``here`` knows it
        self.gone: list[PeerId] = []  # what it was before
        # The regions of ``there`` that ``here`` may read: those registered at the last ``connect``
        # and not deregistered since.
        self.known: set[int] = set()
        self.moving: dict[TransferId, ModelledTransfer] = {}
        self.ended: dict[TransferId, State] = {}  # and not forgotten
        self.free: list[bytes] = []  # payloads sent with ``notify``, in order
        self.bound: list[bytes] = []  # to transfers that are DONE
        self.perhaps: set[bytes] = set()  # bound to what ``disconnect`` ended: may arrive or not
        self.received: list[bytes] = []

    def _side(self, transport: Transport) -> ModelledTransport:
        buffers = [self.lab.buffer(SLOTS * SLOT) for _ in range(REGIONS)]
        side = ModelledTransport(transport, buffers, [buffer.get() for buffer in buffers])
        for region in range(REGIONS):
            for index in range(SLOTS):
                side.put((region, index), pattern(SLOT, next(self.seeds)))
            transport.register(buffers[region].region)
            side.registered.add(region)
        return side

    def teardown(self) -> None:
        """End every transfer, compare all memory with the model, and close the transports."""
        try:
            self._end_all()
            self._all_arrived()
            self.idle_slots_hold_what_they_should()
        finally:
            self.lab.__exit__(None, None, None)

    # Memory.

    @rule(region=st.integers(0, REGIONS - 1), here=st.booleans())
    def register(self, region: int, here: bool) -> None:
        side = self.here if here else self.there
        side.transport.register(side.buffers[region].region)
        # A region that is registered again counts as another region, which ``here`` does not know.
        if not here and region not in side.registered:
            self.known.discard(region)
        side.registered.add(region)

    @rule(region=st.integers(0, REGIONS - 1), here=st.booleans())
    def deregister(self, region: int, here: bool) -> None:
        side = self.here if here else self.there
        memory = side.buffers[region].region
        if region not in side.registered:
            refused(side.transport.deregister, memory)
            return
        self._end_those({(region, slot) for slot in range(SLOTS)}, here=here)
        side.transport.deregister(memory)
        side.registered.discard(region)
        if not here and self.peer is not None:
            self.connect()

    @rule(slot=slots, here=st.booleans())
    def write_memory(self, slot: Slot, here: bool) -> None:
        """Overwrite a slot of ``here`` or of ``there``, after ending the transfers that use it."""
        self._end_those({slot}, here=here)
        (self.here if here else self.there).put(slot, pattern(SLOT, next(self.seeds)))

    # Connections.

    @initialize(is_connected=st.sampled_from([True, True, False]))
    def begin(self, is_connected: bool) -> None:
        """Begin most sequences with a connection, without which few calls can be made."""
        if is_connected:
            self.connect()

    @rule()
    def connect(self) -> None:
        peer = self.here.transport.connect(self.there.transport.address())
        assert self.peer in (None, peer), "connecting again is the same peer"
        assert peer not in self.gone, "the id of a peer was used again"
        self.peer = peer
        self.known = set(self.there.registered)

    @precondition(lambda self: self.peer is not None)
    @rule()
    def disconnect(self) -> None:
        assert self.peer is not None
        self._all_arrived()
        self.here.transport.disconnect(self.peer)
        self.gone.append(self.peer)
        self.peer = None
        for transfer in list(self.moving):
            (status,) = self.lab.poll([transfer])
            assert status.state.final, "disconnect returned before it was quiet"
            moving = self.moving[transfer]
            if moving.notify is not None:
                self.perhaps.add(moving.notify)
            moving.notify, moving.cancelled = None, True
            self._ended(transfer, status.state)

    # Transfers.

    @precondition(lambda self: self.peer is not None)
    @rule(
        pairs=pairs,
        shift=st.integers(0, 64),
        nbytes=st.sampled_from([0, 1, 100, SLOT - 64]),
        notify=st.booleans(),
    )
    def start(self, pairs: list[tuple[Slot, Slot]], shift: int, nbytes: int, notify: bool) -> None:
        assert self.peer is not None
        copies = self._copies(pairs, shift, nbytes)
        if self._is_a_mistake(pairs):
            refused(self.lab.transport.read, self.peer, copies)
            return
        # End the transfers that use one of these slots: their outcomes would depend on the order.
        self._end_those({one for one, _ in pairs}, here=True)
        self._end_those({other for _, other in pairs}, here=False)
        if len(self.moving) >= (self.lab.capabilities.max_outstanding or 64):
            self._end_all()
        payload = self._payload(BOUND) if notify and self.lab.notifies else None
        transfer = self.lab.transport.read(self.peer, copies, payload)
        assert transfer not in self.moving | self.ended, "the id of a transfer was used again"
        self.moving[transfer] = ModelledTransfer(pairs, shift, nbytes, payload)

    def _is_a_mistake(self, pairs: list[tuple[Slot, Slot]]) -> bool:
        here, there = {one for (one, _), _ in pairs}, {other for _, (other, _) in pairs}
        return not (here <= self.here.registered and there <= self.known)

    def _copies(self, pairs: list[tuple[Slot, Slot]], shift: int, nbytes: int) -> Copies:
        """Return a batch with one copy, in a segment of its own, for each pair of slots."""
        cuts = [
            batch(
                self.here.buffers[one].region,
                self.there.buffers[other].region,
                [near * SLOT + shift],
                [far * SLOT + 64 - shift],
                [nbytes],
            )
            for (one, near), (other, far) in pairs
        ]
        none = batch(self.here.buffers[0].region, self.there.buffers[0].region, [], [], [])
        return joined(cuts) if cuts else replace(none, segments=())

    @precondition(lambda self: self.moving)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(sorted(self.moving)))
        self.here.transport.cancel(transfer)
        self.moving[transfer].cancelled = True

    @precondition(lambda self: self.moving)
    @rule(data=st.data())
    def wait_for_one(self, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(sorted(self.moving))))

    @rule()
    def poll_all(self) -> None:
        transfers = [*self.moving, *self.ended]
        statuses = self.lab.poll(transfers)
        for transfer, status in zip(transfers, statuses, strict=True):
            if transfer in self.ended:
                assert status.state is self.ended[transfer], "a final state has changed"
            elif status.state.final:
                self._ended(transfer, status.state)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(sorted(self.ended)))
        self.here.transport.forget(transfer)
        del self.ended[transfer]
        refused(self.here.transport.poll, [transfer])
        refused(self.here.transport.forget, transfer)

    # Notifications.

    @precondition(lambda self: self.peer is not None and self.lab.notifies)
    @rule()
    def notify(self) -> None:
        assert self.peer is not None
        self.free.append(self._payload(FREE))
        self.here.transport.notify(self.peer, self.free[-1])

    def _payload(self, sort: int) -> bytes:
        """Return a payload that was not used before, with ``sort`` as its last bit."""
        return self.lab.payload(2 * next(self.seeds) + sort)

    @rule()
    def receive(self) -> None:
        assert self.here.transport.notifications() == [], "nobody sends to this side"
        for note in self.there.transport.notifications():
            assert note.sender == self.here.transport.name
            self.received.append(note.payload)

    # What must hold.

    @invariant()
    def what_arrived_was_sent(self) -> None:
        sent = Counter([*self.free, *self.bound, *self.perhaps])
        sent.update(one.notify for one in self.moving.values() if one.notify is not None)
        assert not Counter(self.received) - sent, "more arrived than was sent"
        free = [one for one in self.received if one[-1] % 2 == FREE]
        assert free == self.free[: len(free)], "free notifications lost their order"

    @rule()
    def idle_slots_hold_what_they_should(self) -> None:
        busy: tuple[set[Slot], set[Slot]] = (set(), set())
        for moving in self.moving.values():
            for pair in moving.pairs:
                for slots_of_side, slot in zip(busy, pair, strict=True):
                    slots_of_side.add(slot)
        for side, used in zip((self.here, self.there), busy, strict=True):
            for region in range(REGIONS):
                found = side.buffers[region].get().reshape(SLOTS, SLOT)
                idle = [slot for slot in range(SLOTS) if (region, slot) not in used]
                wanted = side.model[region].reshape(SLOTS, SLOT)
                np.testing.assert_array_equal(found[idle], wanted[idle])

    # How transfers end.

    def _end_all(self) -> None:
        for transfer in list(self.moving):
            if transfer in self.moving:
                self._end(transfer)

    def _end_those(self, used: set[Slot], *, here: bool) -> None:
        """End the transfers that use one of these slots of ``here``, or else of ``there``."""
        for transfer, moving in list(self.moving.items()):
            touched = {pair[0 if here else 1] for pair in moving.pairs}
            if used & touched and transfer in self.moving:
                self._end(transfer)

    def _end(self, transfer: TransferId) -> None:
        status = self.lab.known(transfer)
        if not status.state.final:
            self.lab.until(lambda: self.lab.state(transfer).final, 1.0)
            (status,) = self.lab.poll([transfer])
        if status.state.final:
            self._ended(transfer, status.state)
        else:
            self.disconnect()

    def _ended(self, transfer: TransferId, state: State) -> None:
        moving = self.moving.pop(transfer)
        self.ended[transfer] = state
        if state is State.DONE:
            self._apply(moving)
            return
        assert moving.cancelled, "it failed without a reason"
        # Some bytes may have arrived. Write others: none may arrive any more.
        for slot, _ in moving.pairs:
            self.here.put(slot, pattern(SLOT, next(self.seeds)))

    def _apply(self, moving: ModelledTransfer) -> None:
        if moving.notify is not None:
            self.bound.append(moving.notify)
        for (one, near), (other, far) in moving.pairs:
            mine = self.here.model[one][near * SLOT + moving.shift :][: moving.nbytes]
            theirs = self.there.model[other][far * SLOT + 64 - moving.shift :][: moving.nbytes]
            mine[:] = theirs

    def _all_arrived(self) -> None:
        """Assert that all free notifications and those of DONE transfers arrive."""

        def there() -> bool:
            self.receive()
            return not Counter([*self.free, *self.bound]) - Counter(self.received)

        self.lab.wait_for(there, "a notification has not arrived")
