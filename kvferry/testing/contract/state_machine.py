"""A state machine that makes calls in any order, and compares the driver with a model.

The transport ``here`` reads from the transport ``there``, whose memory never changes. In ``here``,
every slot that no transfer uses must have the bytes of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvferry.core.transport import PeerId, State, TransferId, Transport
from kvferry.core.transport.copies import Copies
from kvferry.testing.contract.copy_batches import batch, joined
from kvferry.testing.contract.workbench import ContractSettings, Workbench, refused
from kvferry.testing.memory import Buffer, Bytes

REGIONS, SLOTS, SLOT = 3, 16, 4096
_STEPS = 40

Slot = tuple[int, int]
"""The index of a region, and the index of a slot in that region."""

regions = st.integers(0, REGIONS - 1)
slots = st.tuples(regions, st.integers(0, SLOTS - 1))
pairs = st.lists(st.tuples(slots, slots), max_size=6, unique_by=lambda pair: pair[0])
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
    registered: set[int] = field(default_factory=lambda: set(range(REGIONS)))


@dataclass(slots=True, eq=False)
class ModelledTransfer:
    """A transfer that is unfinished in the model: no poll has shown a final status yet."""

    pairs: list[tuple[Slot, Slot]]  # the local and the remote slot of each copy
    shift: int  # the offset of each copy in its local slot; in its remote slot it is 64 - shift
    nbytes: int  # of each copy
    cancelled: bool = False  # or its peer was disconnected: it may be FAILED


class DriverMachine(RuleBasedStateMachine):
    """The calls from which Hypothesis chooses, each with the check of its outcome."""

    def __init__(self, lab: Workbench) -> None:
        super().__init__()
        self.lab = lab
        self.here, self.there = self._modelled(lab.transport), self._modelled(lab.make())
        self.peer: PeerId | None = None  # ``there``, as ``here`` knows it
        self.gone: list[PeerId] = []  # what it was before
        # The regions of ``there`` that ``here`` may read: those registered at the last ``connect``
        # and not deregistered since.
        self.known: set[int] = set()
        self.moving: dict[TransferId, ModelledTransfer] = {}
        self.ended: set[TransferId] = set()

    def _modelled(self, transport: Transport) -> ModelledTransport:
        buffers = [self.lab.buffer(SLOTS * SLOT, transport) for _ in range(REGIONS)]
        for buffer in buffers:
            buffer.put(self.lab.fresh(SLOTS * SLOT))
        return ModelledTransport(transport, buffers, [buffer.get() for buffer in buffers])

    def teardown(self) -> None:
        """End every transfer, compare all memory with the model, and close the transports."""
        try:
            self._end(self.moving)
            self.idle_slots_hold_what_they_should()
        finally:
            self.lab.__exit__(None, None, None)

    # Memory and connections.

    @rule(region=regions, here=st.booleans())
    def register(self, region: int, here: bool) -> None:
        side = self.here if here else self.there
        side.transport.register(side.buffers[region].region)
        # A region that is registered again counts as another region, which ``here`` does not know.
        if not here and region not in side.registered:
            self.known.discard(region)
        side.registered.add(region)

    @rule(region=regions, here=st.booleans())
    def deregister(self, region: int, here: bool) -> None:
        side = self.here if here else self.there
        memory = side.buffers[region].region
        if region not in side.registered:
            refused(side.transport.deregister, memory)
            return
        self._end(
            transfer
            for transfer, moving in self.moving.items()
            if any(pair[0 if here else 1][0] == region for pair in moving.pairs)
        )
        side.transport.deregister(memory)
        side.registered.discard(region)
        if not here and self.peer is not None:
            self.connect()

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
        self.here.transport.disconnect(self.peer)
        self.gone.append(self.peer)
        self.peer = None
        for moving in self.moving.values():
            moving.cancelled = True
        self.poll()
        assert not self.moving, "disconnect returned before it was quiet"

    # Transfers.

    @precondition(lambda self: self.peer is not None)
    @rule(
        pairs=pairs,
        shift=st.integers(0, 64),
        nbytes=st.sampled_from([0, 1, 100, SLOT - 64]),
    )
    def start(self, pairs: list[tuple[Slot, Slot]], shift: int, nbytes: int) -> None:
        assert self.peer is not None
        copies = self._copies(pairs, shift, nbytes)
        here, there = {one for (one, _), _ in pairs}, {other for _, (other, _) in pairs}
        if not (here <= self.here.registered and there <= self.known):
            refused(self.here.transport.read, self.peer, copies)
            return
        # End the transfers into one of these slots: their outcomes would depend on the order.
        used = {one for one, _ in pairs}
        full = len(self.moving) >= (self.lab.capabilities.max_outstanding or 64)
        self._end(
            transfer
            for transfer, moving in self.moving.items()
            if full or not used.isdisjoint(one for one, _ in moving.pairs)
        )
        if self.peer is None:  # only that could end one
            return
        transfer = self.here.transport.read(self.peer, copies)
        assert transfer not in self.moving, "the id of a transfer was used again"
        assert transfer not in self.ended, "the id of a transfer was used again"
        self.moving[transfer] = ModelledTransfer(pairs, shift, nbytes)

    def _copies(self, pairs: list[tuple[Slot, Slot]], shift: int, nbytes: int) -> Copies:
        """Return a batch with one copy, in a segment of its own, for each pair of slots."""
        near, far = ([one.region for one in side.buffers] for side in (self.here, self.there))
        if not pairs:
            return replace(batch(near[0], far[0], [], [], []), segments=())
        return joined(
            [
                batch(near[i], far[j], at * SLOT + shift, there * SLOT + 64 - shift, nbytes)
                for (i, at), (j, there) in pairs
            ]
        )

    @precondition(lambda self: self.moving)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(sorted(self.moving)))
        self.here.transport.cancel(transfer)
        self.moving[transfer].cancelled = True

    @precondition(lambda self: self.moving)
    @rule(data=st.data())
    def wait_for_one(self, data: st.DataObject) -> None:
        self._end([data.draw(st.sampled_from(sorted(self.moving)))])

    @rule()
    def poll(self) -> None:
        transfers = [*self.moving, *self.ended]
        for transfer, status in zip(transfers, self.lab.poll(transfers), strict=True):
            if transfer in self.moving and status.state.final:
                self._ended(transfer, status.state)

    @rule()
    def idle_slots_hold_what_they_should(self) -> None:
        busy = {one for moving in self.moving.values() for one, _ in moving.pairs}
        for side, used in ((self.here, busy), (self.there, set[Slot]())):
            for region, (buffer, model) in enumerate(zip(side.buffers, side.model, strict=True)):
                idle = [slot for slot in range(SLOTS) if (region, slot) not in used]
                found, wanted = (each.reshape(SLOTS, SLOT)[idle] for each in (buffer.get(), model))
                np.testing.assert_array_equal(found, wanted)

    # How transfers end.

    def _end(self, transfers: Iterable[TransferId]) -> None:
        """Wait until transfers have ended; disconnect if one fails until then."""
        for transfer in list(transfers):
            if transfer in self.moving:
                self.lab.known(transfer)
                self.lab.until(lambda one=transfer: self.lab.state(one).final, 1.0)  # type: ignore[misc]
                self.poll()
                if transfer in self.moving:
                    self.disconnect()

    def _ended(self, transfer: TransferId, state: State) -> None:
        moving = self.moving.pop(transfer)
        self.ended.add(transfer)
        assert state is State.DONE or moving.cancelled, "it failed without a reason"
        for (i, near), (j, far) in moving.pairs:
            model = self.here.model[i][near * SLOT :][:SLOT]
            if state is State.DONE:
                theirs = self.there.model[j][far * SLOT + 64 - moving.shift :][: moving.nbytes]
                model[moving.shift :][: moving.nbytes] = theirs
            else:
                # Some bytes may have arrived. Write others: none may arrive any more.
                model[:] = self.lab.fresh(SLOT)
                self.here.buffers[i].put(model, near * SLOT)
