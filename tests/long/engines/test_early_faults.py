"""Prefill is killed or stopped while decode reads what it has computed so far."""

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
HASTY = {"kv_lease_duration": 2.0}

engines = cast(
    fail=DECODES | {"extra": QUICK},
    recompute=DECODES | {"extra": QUICK, "transfer": RECOMPUTE},
    patient=PREFILLS | CHUNKS,
    **{
        f"victim-{steps}": PREFILLS
        | CHUNKS
        | {"extra": HASTY, "tensor_parallel_size": 2 if steps == 3 else 1}
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
    victim, asked = engines[f"victim-{steps}"], words(LENGTH)
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


def check_others(reference: Engine, prefill: Engine, *decodes: Engine) -> None:
    """Decode loads what prefill has for it."""
    for decode in decodes:
        asked = words(LENGTH)
        assert hand_over_early(prefill, decode, asked) == texts(reference, asked)
