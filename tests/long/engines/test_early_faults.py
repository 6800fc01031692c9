"""Either engine is killed or stopped while decode reads what prefill has computed so far.

There is a victim for each chunk of the prompt, and all are struck at the same time.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import killing, probes
from tests.engines.early import SENTINEL, Legs, hand_over_early
from tests.engines.engines import Engine, EngineError
from tests.engines.fleet import fleet
from tests.engines.messages import Completion
from tests.engines.ranks import at_rest, come_to, holds
from tests.engines.steps import texts

pytestmark = pytest.mark.timeout(300)

CHUNK = 64
LENGTH = 240
STEPS = range(-(-LENGTH // CHUNK) + 1)
"""How many chunks are computed when a victim is struck; after the last one there is a ticket."""
CHUNKS: dict[str, Any] = {"long_prefill_token_threshold": CHUNK, "max_num_batched_tokens": 512}
"""Several prompts are computed side by side, each in chunks of its own."""
QUICK = {"liveness_interval": 0.2, "liveness_misses": 3, "handshake_timeout": 3.0}
"""Options of a decode engine that finds out soon that prefill is gone."""
HASTY, PATIENT = {"kv_lease_duration": 2.0}, {"kv_lease_duration": 600.0}
"""Options of prefill engines whose leases end soon, and not before the test does."""
FEW_BLOCKS = 56
"""Room for the prompts of all victims, and hardly more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefills:
    """Prefill engines that are struck, one for each number of chunks in ``STEPS``.

    ``healthy`` is another one, and ``decode`` has the engines that read, by their
    ``kv_load_failure_policy``. ``ordinary`` is what they must agree with.
    """

    ordinary: Engine
    healthy: Engine
    decode: dict[str, Engine]
    victims: list[Engine]


@pytest.fixture(scope="module")
def prefills(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefills]:
    with fleet(checkpoint, tmp_path_factory.mktemp("prefills")) as engines:
        found = Prefills(
            ordinary=engines.launch("ordinary"),
            healthy=engines.launch("healthy", "kv_producer", PATIENT, **CHUNKS),
            decode={
                policy: engines.launch(
                    policy, "kv_consumer", QUICK, {"kv_load_failure_policy": policy}
                )
                for policy in ("fail", "recompute")
            },
            victims=[
                engines.launch(
                    f"victim-{steps}",
                    "kv_producer",
                    HASTY,
                    tensor_parallel_size=2 if steps == 3 else 1,
                    **CHUNKS | {"max_num_batched_tokens": 2 * CHUNK},
                )
                for steps in STEPS
            ],
        )
        engines.wait_started()
        yield found


@dataclass(frozen=True, slots=True, kw_only=True)
class Decodes:
    """Decode engines that are struck, one for each number of chunks in ``STEPS``.

    ``hasty`` and ``patient`` prefill, with short and with long leases. ``other`` decodes, too.
    """

    ordinary: Engine
    hasty: Engine
    patient: Engine
    other: Engine
    victims: list[Engine]


@pytest.fixture(scope="module")
def decodes(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decodes]:
    few = CHUNKS | {"num_gpu_blocks_override": FEW_BLOCKS}
    with fleet(checkpoint, tmp_path_factory.mktemp("decodes")) as engines:
        found = Decodes(
            ordinary=engines.launch("ordinary"),
            hasty=engines.launch("hasty", "kv_producer", HASTY, **CHUNKS),
            patient=engines.launch("patient", "kv_producer", PATIENT, **few),
            other=engines.launch("other", "kv_consumer"),
            victims=[
                engines.launch(
                    f"victim-{steps}",
                    "kv_consumer",
                    tensor_parallel_size=2 if steps == 3 else 1,
                )
                for steps in STEPS
            ],
        )
        engines.wait_started()
        yield found


def pids(engine: Engine) -> list[int]:
    found: list[int] = engine.run(killing.victim).pids
    return found


def strike(victims: Sequence[int], number: signal.Signals) -> None:
    for pid in victims:
        os.kill(pid, number)


def begin(prefill: Engine, decode: Engine, seed: int) -> Legs:
    """Hand a prompt to both engines."""
    legs = Legs(prefill, decode, prompt(LENGTH, seed=seed))
    legs.begin_prefill()
    legs.begin_decode()
    return legs


def right(engine: Engine, *seeds: int) -> list[str]:
    """The texts of an ordinary engine."""
    return texts(engine, *[prompt(LENGTH, seed=seed) for seed in seeds])


Begun = list[dict[str, Legs]]
"""A request of each victim of `Prefills`, for each ``kv_load_failure_policy``."""


def begin_until_struck(prefills: Prefills, seed: int) -> Begun:
    """Let each paused victim compute its chunks, and decode read them."""
    for decode in prefills.decode.values():
        decode.run(probes.fill_caches, SENTINEL)
    begun = []
    for steps, victim in zip(STEPS, prefills.victims, strict=True):
        here = {policy: begin(victim, d, seed + steps) for policy, d in prefills.decode.items()}
        begun.append(here)
        before_ticket = min(steps, STEPS[-2])
        victim.step(before_ticket)
        for legs in here.values() if steps > 1 else ():
            legs.wait_read(CHUNK * (before_ticket - 1))
    with contextlib.ExitStack() as paused:  # so that decode has not heard of the ticket
        for decode in prefills.decode.values():
            paused.enter_context(decode.paused())
        prefills.victims[-1].step()
    return begun


def check_struck(prefills: Prefills, struck: Begun, seed: int) -> list[Completion]:
    """Decode computes what it was to load, or fails; others' requests are loaded.

    Returns:
        What the engine says that fails, of each victim.
    """
    others = [begin(prefills.healthy, d, seed + 20) for d in prefills.decode.values()]
    for legs in others:
        assert legs.texts() == right(prefills.ordinary, seed + 20)
    completions = {
        policy: decode.results([each[policy].here[0] for each in struck])
        for policy, decode in prefills.decode.items()
    }
    expected = right(prefills.ordinary, *range(seed, seed + len(STEPS)))
    assert [each.text for each in completions["recompute"]] == expected
    return completions["fail"]


def test_prefill_that_is_stopped_and_goes_on(prefills: Prefills) -> None:
    """It gives back what nobody came for, and serves the next.

    The pages of a process that is stopped can be read, so the ticket may still be good.
    """
    engines = (*prefills.decode.values(), *prefills.victims)
    rest = at_rest(*engines)
    processes = [pid for victim in prefills.victims for pid in pids(victim)]
    with contextlib.ExitStack() as paused:
        for victim in prefills.victims:
            paused.enter_context(victim.paused())
        struck = begin_until_struck(prefills, seed=100)
        strike(processes, signal.SIGSTOP)
        try:
            *failed, last = check_struck(prefills, struck, seed=100)
            come_to(rest[:2], *prefills.decode.values())
        finally:
            strike(processes, signal.SIGCONT)
    assert {each.finish_reason for each in failed} == {"error"}
    assert last.finish_reason == "error" or [last.text] == right(prefills.ordinary, 100 + STEPS[-1])
    come_to(rest, *engines)
    seeds = range(150, 150 + len(prefills.victims))
    for decode in prefills.decode.values():
        again = [begin(v, decode, seed) for seed, v in zip(seeds, prefills.victims, strict=True)]
        assert [each.texts()[0] for each in again] == right(prefills.ordinary, *seeds)
    come_to(rest, *engines)


def test_prefill_that_is_killed(prefills: Prefills) -> None:
    engines = (*prefills.decode.values(), prefills.healthy)
    rest = at_rest(*engines)
    processes = [pid for victim in prefills.victims for pid in pids(victim)]
    with contextlib.suppress(OSError, EngineError), contextlib.ExitStack() as paused:
        for victim in prefills.victims:
            paused.enter_context(victim.paused())
        struck = begin_until_struck(prefills, seed=200)
        strike(processes, signal.SIGKILL)
    *failed, last = check_struck(prefills, struck, seed=200)
    assert {each.finish_reason for each in failed} == {"error"}
    # Its ticket was out: decode may have read the last pages before the blow.
    assert last.finish_reason == "error" or [last.text] == right(prefills.ordinary, 200 + STEPS[-1])
    come_to(rest, *engines)


def begin_and_strike(
    decodes: Decodes, processes: Sequence[Sequence[int]], number: signal.Signals, seed: int
) -> tuple[list[Legs], list[Legs]]:
    """Compute a prompt for each victim on both prefill engines, and strike it at its chunk.

    Args:
        decodes: The engines.
        processes: Those of each victim.
        number: What strikes them.
        seed: The first prompt's.

    Returns:
        What each has from the hasty prefill engine, and from the patient one.
    """
    prefills = (decodes.hasty, decodes.patient)
    with contextlib.ExitStack() as paused:
        for prefill in prefills:
            paused.enter_context(prefill.paused())
        hasty, patient = (
            [begin(prefill, victim, seed + n) for n, victim in enumerate(decodes.victims)]
            for prefill in prefills
        )
        for steps in STEPS:
            for prefill in prefills if steps else ():
                prefill.step()
            for legs in (hasty[steps], patient[steps]) if 1 < steps < STEPS[-1] else ():
                legs.wait_begun()
            strike(processes[steps], number)
    for legs in hasty + patient:
        [computed] = legs.prefill.results(legs.there)
        assert computed.finish_reason == "length"
    return hasty, patient


def check_others(decodes: Decodes, seed: int) -> None:
    """Another decode engine loads what either engine prefills."""
    for prefill in (decodes.hasty, decodes.patient):
        got = hand_over_early(prefill, decodes.other, prompt(LENGTH, seed=seed))
        assert got == right(decodes.ordinary, seed)


def test_decode_that_is_stopped_and_goes_on(decodes: Decodes) -> None:
    """It loads what is still held, and nothing else."""
    engines = (decodes.hasty, decodes.patient, decodes.other, *decodes.victims)
    rest = at_rest(*engines)
    processes = [pids(victim) for victim in decodes.victims]
    hasty, patient = begin_and_strike(decodes, processes, signal.SIGSTOP, seed=300)
    try:
        check_others(decodes, 320)
        come_to(rest[:1], decodes.hasty)
    finally:
        for each in processes:
            strike(each, signal.SIGCONT)
    expected = right(decodes.ordinary, *range(300, 300 + len(STEPS)))
    assert [text for legs in patient for text in legs.decoded()] == expected
    late = [text for legs in hasty for text in legs.decoded()]
    assert all(text in ("", good) for text, good in zip(late, expected, strict=True))
    come_to(rest, *engines)


def test_decode_that_is_killed(decodes: Decodes) -> None:
    """Leases end, and where they last, requests that lack blocks get those of the dead."""
    rest = at_rest(decodes.hasty)
    processes = [pids(victim) for victim in decodes.victims]
    begin_and_strike(decodes, processes, signal.SIGKILL, seed=400)
    come_to(rest, decodes.hasty)
    [held] = decodes.patient.run(holds)
    assert held >= len(STEPS) - 1
    longer = prompt(1000, seed=450)
    assert texts(decodes.patient, longer) == texts(decodes.ordinary, longer)
    assert decodes.patient.run(holds) < [held]
    check_others(decodes, 420)
