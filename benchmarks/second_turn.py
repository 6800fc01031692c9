"""Conversations: the time to the first token, with and without decode's tickets.

    python -m benchmarks.second_turn [--rounds 12] [--quick] [--json FILE]

Two pairs of vLLM engines with KVFerryConnector over loopback, one with ``bidirectional_kv_xfer``,
lead the same conversations of four turns, by turns: the pair whose turn it is not stands still. The
time to the first token is that of prefill's answer and decode's first token, one after the other.
With tickets, prefill pulls the answers of the turns before from decode; without, it computes them.
It needs vLLM's CPU build.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks import harness, serving
from benchmarks.harness import Row, Way, row

TURNS = 4
FIRST_TOKENS, NEXT_TOKENS, ANSWER_TOKENS = 128, 32, 208
"""Of the user's first message, of each later one, and of each answer."""
SHAPE = {
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 512,
    "intermediate_size": 2048,
}
ARGUMENTS = {
    "block_size": 32,
    "num_gpu_blocks_override": 2048,
    "max_model_len": 2048,
    "enable_prefix_caching": True,
}
WITH, WITHOUT = "with tickets", "without"
SETTINGS: dict[str, dict[str, Any]] = {WITH: {"bidirectional_kv_xfer": True}, WITHOUT: {}}
SECTION = "time to the first token in conversations, vLLM on a CPU"
OF = "time without bidirectional_kv_xfer"


def converse(pair: serving.Pair, number: int) -> list[float]:
    """Have a conversation; seconds to the first token of each turn."""
    from examples.tiny_llama import prompt

    harness.say(f"conversation {number + 1}, {pair.name}")
    tokens, ticket, found = list[int](), serving.PREFILL, list[float]()
    with pair.turn():
        for turn in range(TURNS):
            length = NEXT_TOKENS if turn else FIRST_TOKENS
            tokens = [*tokens, *prompt(length, seed=number * TURNS + turn)]
            prefilled = pair.prefill.ask([tokens], [ticket], 1, 1)
            if (prefilled.pulled > 0) != (turn > 0 and pair.name == WITH):
                raise SystemExit(f"{pair.name}: prefill has pulled {prefilled.pulled} tokens")
            [answer] = pair.decode.ask(
                [tokens], [prefilled.each[0].ticket or {}], 1, ANSWER_TOKENS
            ).each
            if len(answer.tokens) != ANSWER_TOKENS:
                raise SystemExit(f"{pair.name}: an answer of {len(answer.tokens)} tokens")
            found.append(prefilled.seconds + answer.first)
            tokens, ticket = [*tokens, *answer.tokens], answer.ticket or serving.PREFILL
    return found


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Both pairs by turns, each in the same conversation."""
    harness.need_vllm()
    with ExitStack() as stack:
        fleet = serving.Fleet(stack, SHAPE, ARGUMENTS)
        ways: list[Way] = []
        for name, extra in SETTINGS.items():
            transfer = serving.kvferry("loopback", **extra) | {"kv_role": "kv_both"}
            pair = fleet.pair(name, transfer, transfer)
            numbers = itertools.count()
            ways.append(lambda pair=pair, numbers=numbers: converse(pair, next(numbers)))  # type: ignore[misc]
        ours, theirs = harness.by_turns(ways, options.rounds or (1 if options.quick else 12))
    later = [np.median(each[:, 1:], axis=1) for each in (ours, theirs)]
    yield row(SECTION, f"turns 2 to {TURNS}", OF, *later, unit="ms", target="≤ 0.7")
    for turn in range(TURNS):
        target = None if turn else "≤ 1.1"
        both = ours[:, turn], theirs[:, turn]
        yield row(SECTION, f"turn {turn + 1}", OF, *both, unit="ms", target=target)


if __name__ == "__main__":
    harness.main(
        measure, __doc__, ("--rounds", {"type": int, "help": "default 12, of 20 seconds each"})
    )
