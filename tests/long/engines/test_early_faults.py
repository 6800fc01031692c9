"""Either engine is killed or stopped while decode reads what prefill has computed so far."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines import ranks
from tests.engines.conversations import words
from tests.engines.early import Legs, hand_over_early
from tests.engines.engines import Engine, EngineError
from tests.engines.fleet import DECODES, PREFILLS, RECOMPUTE, Engines, cast
from tests.engines.steps import texts
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)

CHUNK = 64
LENGTH = 240
STEPS = (0, 3, 4)
"""How many chunks are computed when a victim is struck; after the last one there is a ticket."""
# Several prompts are computed side by side, each in chunks of its own.
CHUNKS: dict[str, Any] = {
    "long_prefill_token_threshold": CHUNK,
    "max_num_batched_tokens": 2 * CHUNK,
}
# Finds out soon that prefill is gone.
QUICK = {"liveness_interval": 0.2, "liveness_misses": 3, "handshake_timeout": 3.0}
HASTY, PATIENT = {"kv_lease_duration": 2.0}, {"kv_lease_duration": 600.0}

engines = cast(
    fail=DECODES | {"extra": QUICK},
    recompute=DECODES | {"extra": QUICK, "transfer": RECOMPUTE},
    hasty=PREFILLS | CHUNKS | {"extra": HASTY},
    patient=PREFILLS | CHUNKS | {"extra": PATIENT},
    **{
        f"{role['role']}-{steps}": role | CHUNKS | {"tensor_parallel_size": 2 if steps == 3 else 1}
        for role in (PREFILLS | {"extra": HASTY}, DECODES)
        for steps in STEPS
    },
)

# First each victim is stopped, and goes on; then it is killed.
strikes = pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
moments = pytest.mark.parametrize("steps", STEPS)


@contextlib.contextmanager
def struck(victim: Engine, number: signal.Signals) -> Iterator[None]:
    """Strike a victim; one that was stopped goes on afterwards."""
    pids = victim.run(ranks.pids)
    for pid in pids:
        os.kill(pid, number)
    try:
        yield
    finally:
        for pid in pids if number == signal.SIGSTOP else ():
            os.kill(pid, signal.SIGCONT)


@moments
@strikes
def test_prefill_is_struck(
    reference: Engine, engines: Engines, steps: int, number: signal.Signals
) -> None:
    """Decode computes what it was to load, or fails; others' requests are loaded.

    Where the ticket was out, decode may have read the last pages before the blow; and the pages of
    a process that is stopped can be read.
    """
    victim, asked = engines[f"kv_producer-{steps}"], words(LENGTH)
    decodes = {policy: engines[policy] for policy in ("fail", "recompute")}
    check_others(reference, victim, *decodes.values())  # so that they are connected
    legs = {policy: Legs(victim, decode, asked) for policy, decode in decodes.items()}
    right = texts(reference, asked)
    with contextlib.suppress(OSError, EngineError), victim.paused():
        for each in legs.values():
            each.begin_prefill()
            each.begin_decode()
        victim.step(steps)
        for each in legs.values() if steps > 1 else ():
            each.wait_begun()
        with struck(victim, number):
            check_others(reference, engines["patient"], *decodes.values())
            failed = legs["fail"].decoded()
            assert failed == [""] or (failed == right and steps == STEPS[-1])
            assert legs["recompute"].decoded() == right
    if number == signal.SIGSTOP:
        check_others(reference, victim, *decodes.values())


@moments
@strikes
def test_decode_is_struck(
    reference: Engine, engines: Engines, steps: int, number: signal.Signals
) -> None:
    """If it goes on, it loads what is still held, and nothing else; another decode engine is not
    affected. Prefill's short leases end meanwhile."""
    victim, asked = engines[f"kv_consumer-{steps}"], words(LENGTH)
    prefills = engines["hasty"], engines["patient"]
    for prefill in prefills:
        check_others(reference, prefill, victim)  # so that they are connected
    hasty, patient = (Legs(prefill, victim, asked) for prefill in prefills)
    with contextlib.ExitStack() as stack:
        with contextlib.ExitStack() as paused:
            for legs in (hasty, patient):
                paused.enter_context(legs.prefill.paused())
                legs.begin_decode()
                legs.begin_prefill()
                legs.prefill.step(steps)
            stack.enter_context(struck(victim, number))
        for legs in (hasty, patient):
            [computed] = legs.prefill.results(legs.there)
            assert computed.finish_reason == "length"
            check_others(reference, legs.prefill, engines["fail"])
        eventually(lambda: hasty.prefill.run(ranks.holds) == [0])
    if number == signal.SIGSTOP:
        right = texts(reference, asked)
        assert patient.decoded() == right
        assert hasty.decoded() in ([""], right)


def check_others(reference: Engine, prefill: Engine, *decodes: Engine) -> None:
    """Decode loads what prefill has for it."""
    for decode in decodes:
        asked = words(LENGTH)
        assert hand_over_early(prefill, decode, asked) == texts(reference, asked)
