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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import harness, serving
from benchmarks.harness import Row, Way, row

CHUNK, BLOCK_TOKENS, BLOCKS, MOST_TOKENS = 256, 32, 512, 4096
LAYERS, KV_HEADS, HEAD_DIM = 6, 8, 64
SHAPE = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_size": 512,
    "intermediate_size": 2048,
}
TOKEN_NBYTES = 2 * 4 * LAYERS * KV_HEADS * HEAD_DIM  # of K and V in float32
ARGUMENTS = {
    "block_size": BLOCK_TOKENS,
    "disable_log_stats": False,
    "dtype": "float32",
    "enable_chunked_prefill": True,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "kv_cache_memory_bytes": BLOCKS * BLOCK_TOKENS * TOKEN_NBYTES,
    "num_gpu_blocks_override": BLOCKS,
    "max_model_len": MOST_TOKENS,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 16,
}
SHORT = (64, 256)  # tokens of prompts that early tickets must not make slower
LOAD_PROMPTS, LOAD_TOKENS = 4, 960
DRIVER, MODULE = "throttled", "from benchmarks.throttled import ThrottledTransport\n"
SEQUENTIAL = "time one after the other"

Prompts = Sequence[list[int]]


class Pair:
    """The engine that prefills, and one that decodes."""

    _rooms = itertools.count()

    def __init__(self, prefill: serving.Engine, decode: serving.Engine) -> None:
        self._prefill, self._decode = prefill, decode
        [ticket] = prefill.prefill([_prompt(2 * CHUNK)])
        host, port = ticket["remote_host"], ticket["remote_port"]
        self._address = {
            "remote_engine_id": ticket["remote_engine_id"],
            "remote_bootstrap_addr": f"http://{host}:{port}",
        }

    def alone(self, prompts: Prompts) -> tuple[float, float]:
        """Prefill's seconds, nothing being handed over."""
        found = self._prefill.ask(prompts, [{}] * len(prompts), len(prompts), 1)
        return found.seconds, found.seconds

    def sequential(self, prompts: Prompts) -> tuple[float, float]:
        """Seconds until decode's (last) first token, and those of prefill."""
        start = perf_counter()
        computed = self._prefill.ask(prompts, [serving.PREFILL] * len(prompts), len(prompts), 1)
        tickets = [answer.ticket or {} for answer in computed.each]
        found = self._decode.ask(prompts, tickets, len(prompts), 1)
        return self._checked(prompts, found, perf_counter() - start), computed.seconds

    def early(self, prompts: Prompts) -> tuple[float, float]:
        """The same, each prompt sent to both engines at once, with a room of its own."""
        rooms = [f"bench-{os.getpid()}-{next(self._rooms)}" for _ in prompts]
        start = perf_counter()
        for engine, params in (
            (self._prefill, {"do_remote_decode": True, "do_remote_prefill": False}),
            (self._decode, {"do_remote_decode": False, "do_remote_prefill": True} | self._address),
        ):
            each = [params | {"transfer_id": room} for room in rooms]
            engine.begin(prompts, each, len(prompts), 1)
        found = self._decode.answers()
        seconds = perf_counter() - start
        return self._checked(prompts, found, seconds), self._prefill.answers().seconds

    def _checked(self, prompts: Prompts, found: serving.Answers, seconds: float) -> float:
        reasons = {answer.reason for answer in found.each}
        if reasons != {"length"} or found.pulled < sum(map(len, prompts)):
            raise SystemExit(f"{found.pulled:.0f} tokens were pulled, and it ended by {reasons}")
        return seconds


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Throttled, prefill's own time, and short prompts."""
    harness.need_vllm()
    rounds = options.rounds or (1 if options.quick else 10)
    tokens = options.prompt or (3 if options.quick else 15) * CHUNK
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        _install_driver(folder / "drivers")
        serving.prepare(str(folder))
        serving.make_model(folder / "model", max_tokens=MOST_TOKENS, **SHAPE)
        prompt, start = _prompt(tokens), partial(_engine, folder, stack)
        prefill = start("prefill", "kv_producer", {})
        alone = [prefill.ask([prompt], [{}], 1, 1).seconds for _ in range(3)][1:]
        rate = options.rate * 1e6 if options.rate else 2 * tokens * TOKEN_NBYTES / np.median(alone)
        harness.say(f"starting an engine that reads {rate / 1e6:.3g} MB/s")
        slow = start("throttled", "kv_consumer", {"bytes_per_second": rate})
        with slow.turn():
            pair = Pair(prefill, slow)
            yield from _throttled(pair, prompt, float(rate), rounds)
            prompts = [_prompt(LOAD_TOKENS, seed) for seed in range(LOAD_PROMPTS)]
            early, other = _times([pair.early, pair.sequential], prompts, rounds)[:, :, 1]
            section = f"prefill of {LOAD_PROMPTS} prompts of {LOAD_TOKENS} tokens at once"
            yield _row(section, "early", SEQUENTIAL, early, other, "≤ 1")
        fast = start("not-throttled", "kv_consumer", {})
        with fast.turn():
            pair = Pair(prefill, fast)
            for count in SHORT:
                ways = [pair.early, pair.sequential]
                early, other = _times(ways, [_prompt(count)], 4 * rounds)[:, :, 0]
                section, case = "time to the first token, not throttled", f"early, {count} tokens"
                yield _row(section, case, SEQUENTIAL, early, other, "≤ 1")


def _throttled(pair: Pair, prompt: list[int], rate: float, rounds: int) -> Iterator[Row]:
    ways = [pair.alone, pair.sequential, pair.early]
    alone, sequential, early = _times(ways, [prompt], rounds)[:, :, 0]
    moving, chunks = len(prompt) * TOKEN_NBYTES / rate, -(-len(prompt) // CHUNK)
    harness.say(f"prefill takes {np.median(alone):.2f} s, moving {moving:.2f} s; {chunks} chunks")
    section = f"time to the first token, {len(prompt)} tokens, moved at {rate / 1e6:.3g} MB/s"
    yield _row(section, "one after the other", "T_p + X", sequential, alone + moving)
    at_once = np.maximum(alone + moving / chunks, moving + alone / chunks)
    yield _row(section, "early", "T_p + X/n", early, at_once, "≤ 1.1")
    yield _row(section, "early", SEQUENTIAL, early, sequential)


def _times(ways: Sequence[Any], prompts: Prompts, rounds: int) -> harness.Times:
    calls: list[Way] = [partial(way, prompts) for way in ways]
    return harness.by_turns(calls, rounds)


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


def _engine(
    folder: Path, stack: ExitStack, name: str, role: str, options: dict[str, Any]
) -> serving.Engine:
    """An engine on half of the cores; one that decodes stands still until its turn."""
    cores = sorted(os.sched_getaffinity(0))
    half = slice(len(cores) // 2) if role == "kv_producer" else slice(len(cores) // 2, None)
    transfer = serving.KVFERRY | {
        "kv_connector_extra_config": {"driver": DRIVER, "driver_options": options},
        "kv_role": role,
        "kv_load_failure_policy": "fail",
    }
    own = {"model": str(folder / "model"), "kv_transfer_config": transfer}
    engine = serving.Engine(name, folder, ARGUMENTS | own, cores=cores[half])
    stack.callback(engine.close)
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

    folder.mkdir()
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
