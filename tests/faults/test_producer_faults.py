"""Loads end correctly when their producer or the link to it fails at any stage.

Whatever the fault and the stage: the load has its own bytes or has failed, it is reported once, no
page stays held, and the next load works.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.faults.cable import OVER, STAGES, pester
from tests.faults.engine_pair import EnginePair, engine_pair
from tests.faults.engine_processes import LONG_TIMEOUTS, OPTIONS
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(180)

HANDSHAKE_STAGES = {"before the handshake", "during the handshake"}
LOAD_STAGES = {*HANDSHAKE_STAGES, "reading", "fencing"}
FAILING_STAGES = {
    "killed": LOAD_STAGES,
    "stopped": {"before the handshake"},
    "restarted": LOAD_STAGES,
    "pestered": set[str](),
    "cut off": LOAD_STAGES,
    "slow": set[str](),
    "garbage": LOAD_STAGES,
    "aborted": LOAD_STAGES,
    "out of blocks": LOAD_STAGES,
}
"""Each fault, and the stages at which it must fail the load.

A producer that is stopped during the handshake continues soon; one that is stopped before the
handshake continues after the deadline only. Whether the memory of a stopped process can be read
depends on the driver.
"""
NOT_PROXIED = {"killed", "stopped", "restarted", "pestered"}
"""Faults of the process itself, for which the side channel has no proxy in front."""
OVER_DRIVERS = ("killed", "stopped", "restarted", "aborted", "out of blocks")
"""The faults that are tried over all drivers."""
DRIVERS_AND_FAULTS = [
    (OVER, fault) for fault in (FAILING_STAGES if OVER == "loopback" else OVER_DRIVERS)
]
SLOW_SECONDS = 0.5


def slow_down(pair: EnginePair) -> None:
    """Delay every piece of a reply, of which a handshake has many, and every read."""
    pair.cable.delay = pair.producer.channel.delay = SLOW_SECONDS


def send_garbage(pair: EnginePair) -> None:
    """Let the side channel answer with random bytes, and fill the slot table with them."""
    pair.producer.channel.noisy = frozenset({"replies"})
    pair.producer.process.ask("corrupt_slot_table")


INJECT: dict[str, Callable[[EnginePair], object]] = {
    "killed": lambda pair: pair.producer.process.kill(),
    "stopped": lambda pair: pair.producer.process.signal(signal.SIGSTOP),
    "restarted": lambda pair: pair.producer.restart(),
    "pestered": lambda pair: pester(pair.producer.port),
    "cut off": lambda pair: pair.cut(),
    "slow": slow_down,
    "garbage": send_garbage,
    "aborted": lambda pair: pair.producer.process.ask("reuse_pages"),
    "out of blocks": lambda pair: pair.producer.process.ask("hold_other_pages", "p-9"),
}


def end_fault(pair: EnginePair, fault: str) -> None:
    if fault == "killed":
        pair.producer.start(pair.producer.port)
    elif fault == "stopped":
        pair.producer.process.signal(signal.SIGCONT)


@pytest.mark.parametrize("fault", ["killed", "stopped", "restarted"])
def test_load_fails_when_producer_fails_while_computing(fault: str) -> None:
    """Transfers from a stopped process do not fail: only its silent side channel shows it."""
    with engine_pair(proxied=False) as pair:
        pair.begin_load("d-1", pair.producer.serve("p-1", "serve_uncomputed"))
        eventually(lambda: pair.driver.slot_reads > 3, "the slot word is read repeatedly")
        INJECT[fault](pair)
        assert pair.outcome("d-1") == "PeerLostError"
        end_fault(pair, fault)
        if fault == "stopped":
            pair.producer.process.ask("reset")
        pair.expect_recovery()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("driver", "fault"), DRIVERS_AND_FAULTS)
def test_load_is_correct_or_fails(driver: str, fault: str, stage: str) -> None:
    options = LONG_TIMEOUTS if fault == "slow" else OPTIONS
    with engine_pair(options, driver=driver, proxied=fault not in NOT_PROXIED) as pair:
        if fault == "slow":
            pair.producer.lease = LONG_TIMEOUTS.load_timeout
        pair.begin_load_until(stage, lambda: INJECT[fault](pair))
        outcome = pair.outcome_or_quarantine("d-1")
        if fault != "stopped" or driver == "loopback":
            assert (outcome != "loaded") is (stage in FAILING_STAGES[fault]), outcome
            assert "quarantine" not in outcome
        end_fault(pair, fault)
        pair.outcome("d-1")
        pair.expect_recovery()
