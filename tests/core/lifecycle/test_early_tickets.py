"""Faults of early tickets that a search rarely finds, caught by fixed sequences of events."""

from __future__ import annotations

import pytest

from kvferry.core.lifecycle.loads import Loads
from kvferry.core.lifecycle.worker_holds import WorkerHolds
from tests.core.lifecycle.early_engines import PLANS, Components, EarlySimulation
from tests.core.lifecycle.early_tickets import (
    MarkedBeforeItsGeneration,
    NoFence,
    OldReadNotAwaited,
    WatermarkNotZeroed,
)
from tests.core.lifecycle.fabric import ProtocolViolation
from tests.core.lifecycle.producer import LEASE, PrefillState


def read_beside_a_take_on(loads: type[Loads]) -> None:
    """Read the words of a slot when the ranks begin another hold there, after an old watermark."""
    simulation = EarlySimulation(plan=PLANS[0], slots=1, components=Components(loads=loads))
    simulation.ask(size=3, drafter=False, fits=True, decodes=False)
    while simulation.prefill.prompts:
        simulation.compute()
        simulation.wait(LEASE)
    simulation.ask(size=3, drafter=False, fits=True, decodes=True)
    for _ in range(2):  # the part is published before any rank has heard of the hold
        simulation.schedule()
    simulation.hear()
    simulation.look()
    simulation.land(1)
    for rank in simulation.prefill.ranks:
        rank.launch()
    simulation.read()
    simulation.finish()


def test_an_old_watermark_is_not_taken_for_the_next_hold_s() -> None:
    read_beside_a_take_on(Loads)


def test_a_watermark_read_before_its_generation_is_caught() -> None:
    with pytest.raises(ProtocolViolation, match="stale bytes accepted"):
        read_beside_a_take_on(MarkedBeforeItsGeneration)


def finish_beside_an_old_read(loads: type[Loads]) -> None:
    """Hear of the ticket of another hold while pages of the one before are being read."""
    simulation = EarlySimulation(plan=PLANS[0], slots=1, components=Components(loads=loads))
    simulation.ask(size=3, drafter=False, fits=True, decodes=True)
    for _ in range(2):
        simulation.compute()
    simulation.hear()
    simulation.look()
    for _ in range(2):  # the slot word, and then the watermark
        simulation.land(1)
    [prompt] = simulation.prefill.at(PrefillState.RUNNING)
    simulation.prefill.preempt(prompt)
    while prompt.at is not PrefillState.HELD:
        simulation.compute()
    simulation.hear()
    simulation.finish()


def test_a_read_of_an_old_hold_is_awaited() -> None:
    finish_beside_an_old_read(Loads)


def test_a_read_of_an_old_hold_that_is_not_awaited_is_caught() -> None:
    with pytest.raises(ProtocolViolation, match="two transfers of one load"):
        finish_beside_an_old_read(OldReadNotAwaited)


def read_behind_an_old_watermark(worker_holds: type[WorkerHolds]) -> None:
    """Read the words of a slot after a take-on there, before its device has computed anything."""
    components = Components(worker_holds=worker_holds)
    simulation = EarlySimulation(plan=PLANS[0], slots=1, components=components)
    simulation.ask(size=3, drafter=False, fits=True, decodes=False)
    while simulation.prefill.prompts:
        simulation.compute()
        simulation.wait(LEASE)
    simulation.ask(size=3, drafter=False, fits=True, decodes=True)
    for _ in range(2):  # the part is published with the second step
        simulation.launch()
    simulation.hear()
    simulation.read()
    simulation.finish()


def test_the_watermark_of_the_hold_before_is_not_read() -> None:
    read_behind_an_old_watermark(WorkerHolds)


def test_a_watermark_that_is_not_zeroed_at_take_on_is_caught() -> None:
    with pytest.raises(ProtocolViolation, match="stale bytes accepted"):
        read_behind_an_old_watermark(WatermarkNotZeroed)


def read_after_the_lease(loads: type[Loads]) -> None:
    """Read pages whose lease is over, and which another prompt has got."""
    simulation = EarlySimulation(plan=PLANS[0], slots=2, components=Components(loads=loads))
    simulation.ask(size=3, drafter=False, fits=True, decodes=True)
    [prompt] = simulation.prefill.prompts.values()
    while prompt.at is not PrefillState.HELD:
        simulation.compute()
    simulation.hear()
    while simulation.prefill.prompts:
        simulation.wait(LEASE)
        simulation.compute()
    simulation.ask(size=3, drafter=False, fits=True, decodes=False)
    for _ in range(4):
        simulation.compute()
    for _ in range(2):  # the pages, and then the fence
        simulation.land(1 << 10)
    simulation.finish()


def test_pages_whose_lease_is_over_are_not_accepted() -> None:
    read_after_the_lease(Loads)


def test_no_fence_is_caught() -> None:
    with pytest.raises(ProtocolViolation, match="stale bytes accepted"):
        read_after_the_lease(NoFence)
