"""Real vLLM engines: time to the first token, with ordinary tickets and with early ones.

    python -m benchmarks.early [--rate MB/S] [--rounds 10] [--prompt 3840] [--quick] [--json FILE]

One engine prefills in chunks of 256 tokens, another decodes, both by ``KVFerryConnector`` over
loopback. The decode engine's reads keep to a rate (``benchmarks.throttled``), by default such
that moving a prompt takes half as long as computing it, which is measured first. Three ways take
turns: prefill alone; the sequential way, which gives decode the ticket of prefill's answer; and the
early way, which sends the request to both engines at once, with a common ``transfer_id``. The time
is from the first request until decode's first token. Either engine has half of the cores, as if on
a host of its own.

With T_p, prefill alone, X, the bytes by the rate, and n chunks, the early way is to take T_p + X/n
and at most 10 % more (``docs/early-tickets.md``). A second decode engine, without a rate, shows
that early tickets cost short prompts nothing; and the seconds of prefill for several prompts at
once, that they cost prefill nothing. It needs vLLM's CPU build.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import harness, serving
from benchmarks.harness import Row, row

CHUNK, MOST_TOKENS = 256, 4096
SHAPE = {
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 512,
    "intermediate_size": 2048,
}
ARGUMENTS = {
    "block_size": 32,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": False,
    "num_gpu_blocks_override": 512,
    "max_model_len": MOST_TOKENS,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 16,
}
SHORT = (64, 256)  # tokens of prompts that early tickets must not make slower
LOAD_PROMPTS, LOAD_TOKENS = 4, 960
DRIVER, MODULE = "throttled", "from benchmarks.throttled import ThrottledTransport\n"
SEQUENTIAL = "time one after the other"

Prompts = Sequence[list[int]]
Seconds = tuple[float, float]
"""Until decode's (last) first token, and those of prefill."""

_rooms = itertools.count()


def alone(prefill: serving.Engine, prompts: Prompts) -> Seconds:
    """Prefill's seconds, nothing being handed over."""
    found = prefill.ask(prompts, [{}] * len(prompts), len(prompts), 1)
    return found.seconds, found.seconds


def sequential(prefill: serving.Engine, decode: serving.Engine, prompts: Prompts) -> Seconds:
    """Decode gets the tickets of prefill's answers."""
    start = perf_counter()
    computed = prefill.ask(prompts, [serving.PREFILL] * len(prompts), len(prompts), 1)
    tickets = [answer.ticket or {} for answer in computed.each]
    found = decode.ask(prompts, tickets, len(prompts), 1)
    found.check(prompts)
    return perf_counter() - start, computed.seconds


def early(
    prefill: serving.Engine, decode: serving.Engine, address: dict[str, str], prompts: Prompts
) -> Seconds:
    """Each prompt is sent to both engines at once, with a room of its own."""
    rooms = [f"bench-{os.getpid()}-{next(_rooms)}" for _ in prompts]
    start = perf_counter()
    for engine, params in (
        (prefill, {"do_remote_decode": True, "do_remote_prefill": False}),
        (decode, {"do_remote_decode": False, "do_remote_prefill": True} | address),
    ):
        each = [params | {"transfer_id": room} for room in rooms]
        engine.begin(prompts, each, len(prompts), 1)
    found = decode.answers()
    seconds = perf_counter() - start
    found.check(prompts)
    return seconds, prefill.answers().seconds


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Throttled, prefill's own time, and short prompts."""
    harness.need_vllm()
    rounds = options.rounds or (1 if options.quick else 10)
    tokens = options.prompt or (3 if options.quick else 15) * CHUNK
    with ExitStack() as stack:
        _install_driver(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        fleet = serving.Fleet(stack, SHAPE, ARGUMENTS)
        prefill = _engine(fleet, "prefill", "kv_producer")
        [ticket] = prefill.prefill([_prompt(2 * CHUNK)])
        address = {
            "remote_engine_id": ticket["remote_engine_id"],
            "remote_bootstrap_addr": f"http://{ticket['remote_host']}:{ticket['remote_port']}",
        }

        def ways(decode: serving.Engine) -> list[Callable[[Prompts], Seconds]]:
            at_once = partial(early, prefill, decode, address)
            return [at_once, partial(sequential, prefill, decode)]

        prompt, nbytes = _prompt(tokens), tokens * serving.token_nbytes(SHAPE)
        took = [alone(prefill, [prompt])[0] for _ in range(3)][1:]
        rate = options.rate * 1e6 if options.rate else 2 * nbytes / float(np.median(took))
        harness.say(f"starting an engine that reads {rate / 1e6:.3g} MB/s")
        slow = _engine(fleet, "throttled", "kv_consumer", bytes_per_second=rate)
        with slow.turn():
            three = [partial(alone, prefill), *ways(slow)]
            yield from _throttled(three, prompt, rate, nbytes / rate, rounds)
            prompts = [_prompt(LOAD_TOKENS, seed) for seed in range(LOAD_PROMPTS)]
            ours, theirs = _times(ways(slow), prompts, rounds)[:, :, 1]
            section = f"prefill of {LOAD_PROMPTS} prompts of {LOAD_TOKENS} tokens at once"
            yield _row(section, "early", SEQUENTIAL, ours, theirs, "≤ 1")
        fast = _engine(fleet, "not-throttled", "kv_consumer")
        with fast.turn():
            for count in SHORT:
                ours, theirs = _times(ways(fast), [_prompt(count)], 4 * rounds)[:, :, 0]
                section, case = "time to the first token, not throttled", f"early, {count} tokens"
                yield _row(section, case, SEQUENTIAL, ours, theirs, "≤ 1")


def _throttled(
    ways: Sequence[Any], prompt: list[int], rate: float, moving: float, rounds: int
) -> Iterator[Row]:
    computing, at_once, in_turn = _times(ways, [prompt], rounds)[:, :, 0]
    chunks = -(-len(prompt) // CHUNK)
    harness.say(
        f"prefill takes {np.median(computing):.2f} s, moving {moving:.2f} s; {chunks} chunks"
    )
    section = f"time to the first token, {len(prompt)} tokens, moved at {rate / 1e6:.3g} MB/s"
    yield _row(section, "one after the other", "T_p + X", in_turn, computing + moving)
    formula = np.maximum(computing + moving / chunks, moving + computing / chunks)
    yield _row(section, "early", "T_p + X/n", at_once, formula, "≤ 1.1")
    yield _row(section, "early", SEQUENTIAL, at_once, in_turn)


def _times(ways: Sequence[Any], prompts: Prompts, rounds: int) -> harness.Times:
    return harness.by_turns([partial(way, prompts) for way in ways], rounds)


def _row(
    section: str,
    case: str,
    of: str,
    ours: harness.Times,
    theirs: harness.Times,
    target: str | None = None,
) -> Row:
    section += ", vLLM on a CPU"
    return row(section, case, of, ours, theirs, unit="ms", target=target)


def _engine(fleet: serving.Fleet, name: str, role: str, **options: Any) -> serving.Engine:
    """An engine on half of the cores; one that decodes stands still until its turn."""
    cores = sorted(os.sched_getaffinity(0))
    half = slice(len(cores) // 2) if role == "kv_producer" else slice(len(cores) // 2, None)
    transfer = serving.kvferry(DRIVER, driver_options=options) | {"kv_role": role}
    engine = fleet.engine(name, transfer, cores=cores[half])
    engine.started()
    if role == "kv_consumer":
        with engine.turn():
            pass
    return engine


def _prompt(tokens: int, seed: int = 0) -> list[int]:
    from examples.tiny_llama import prompt

    return prompt(tokens, seed)


def _install_driver(folder: Path) -> None:
    """Let this process, and those that it starts, find the driver that keeps to a rate."""
    from tests.cli.command import install_drivers

    found = install_drivers(folder, MODULE, **{DRIVER: "ThrottledTransport"})
    os.environ["PYTHONPATH"] = found["PYTHONPATH"]
    sys.path.append(str(folder))


if __name__ == "__main__":
    harness.main(
        measure,
        __doc__,
        (
            "--rate",
            {
                "type": float,
                "metavar": "MB/S",
                "help": "of decode's reads; default: moving takes half of prefill's time",
            },
        ),
        ("--rounds", {"type": int, "help": "default 10"}),
        ("--prompt", {"type": int, "help": "tokens; default 3840, of chunks of 256"}),
    )
