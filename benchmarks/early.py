"""Real vLLM engines: time to the first token, with ordinary tickets and with early ones.

    python benchmarks/early.py [--rate MB/S] [--rounds 10] [--prompt 3840] [--quick] [--json FILE]

One engine prefills in chunks of 256 tokens, another decodes, both by ``KVFerryConnector`` over
loopback. The decode engine's reads keep to a rate (``kvferry.testing.throttled``). By default it is
such that moving a prompt takes half as long as computing it, which is measured first; both are
printed. Three ways take turns: prefill alone; the sequential way, which gives decode the ticket of
prefill's answer; and the early way, which sends the request to both engines at once, with a common
``transfer_id`` (the contract of vLLM's MooncakeConnector). The time is from the first request until
decode's first token. The engines that prefill and decode have half of the cores each, as if they
were on hosts of their own: an engine whose requests wait makes empty steps, and where cores are
shared these take time from the other.

With T_p, prefill alone, X, the bytes by the rate, and n chunks, the early way is to take
T_p + X/n and at most 10 % more (``docs/early-tickets.md``). A second decode engine, without a rate,
shows that early tickets cost short prompts nothing; and the seconds of prefill for several prompts
at once show that they cost prefill nothing. Every measurement ends with a look at what vLLM
counted: all prompt tokens came from the other engine.

Where the engines cannot do early tickets, only the sequential way is measured.

It needs vLLM's CPU build.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common
import numpy as np
import rows
import serving

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
TOKEN_NBYTES = 2 * 4 * LAYERS * KV_HEADS * HEAD_DIM
"""Of K and V in float32."""
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
SHORT = (64, 256)
"""Tokens of prompts that early tickets must not make slower."""
LOAD_PROMPTS, LOAD_TOKENS = 4, 960

DRIVER = "throttled"
MODULE = "from kvferry.testing.throttled import ThrottledTransport\n"

TIME = "time to the first token, {} tokens, moved at {:.3g} MB/s, vLLM on a CPU"
FAST = "time to the first token, not throttled, vLLM on a CPU"
PREFILL = f"prefill of {LOAD_PROMPTS} prompts of {LOAD_TOKENS} tokens at once, vLLM on a CPU"
FORMULA = rows.goal(1.1, at_least=False)
NO_SLOWER = rows.goal(1.0, at_least=False)

_rooms = itertools.count()


class Fleet:
    """One engine that prefills, and two that decode, of which one at a time goes on.

    Args:
        folder: has the checkpoint, and gets the logs.
        stack: ends the engines.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        cores = sorted(os.sched_getaffinity(0))
        self._cores = {
            "kv_producer": cores[: len(cores) // 2],
            "kv_consumer": cores[len(cores) // 2 :],
        }
        self.prefill = self._engine("prefill", "kv_producer", {})
        self.prefill.started()

    def decode(self, name: str, options: dict[str, Any]) -> serving.Engine:
        """Start an engine that decodes; it stands still until its ``turn``."""
        engine = self._engine(name, "kv_consumer", options)
        engine.started()
        engine.stop()
        return engine

    def _engine(self, name: str, role: str, options: dict[str, Any]) -> serving.Engine:
        transfer = {
            "kv_connector": "KVFerryConnector",
            "kv_connector_module_path": "kvferry.integrations.vllm",
            "kv_connector_extra_config": {"driver": DRIVER, "driver_options": options},
            "kv_role": role,
            "kv_load_failure_policy": "fail",
        }
        own = {"model": str(self._folder / "model"), "kv_transfer_config": transfer}
        engine = serving.Engine(name, self._folder, ARGUMENTS | own, cores=self._cores[role])
        self._stack.callback(engine.close)
        return engine


@contextmanager
def turn(engine: serving.Engine) -> Iterator[None]:
    """It goes on, and stands still again at the end."""
    engine.go_on()
    try:
        yield
    finally:
        engine.stop()


class Pair:
    """The engine that prefills, and one that decodes; it has to be the latter's turn.

    Attributes:
        has_early: whether they can do early tickets; ``find_early`` finds out.
    """

    def __init__(self, prefill: serving.Engine, decode: serving.Engine) -> None:
        self._prefill, self._decode = prefill, decode
        self._address: serving.Ticket = {}
        self.has_early = False

    def find_early(self, prompt: list[int]) -> None:
        """Try both ways once, which also does what is done once."""
        [ticket] = self._prefill.prefill([prompt])
        self._take([prompt], self._decode.ask([prompt], [ticket], 1, 1))
        host, port = ticket["remote_host"], ticket["remote_port"]
        self._address = {
            "remote_engine_id": ticket["remote_engine_id"],
            "remote_bootstrap_addr": f"http://{host}:{port}",
        }
        found, _ = self._both_legs([prompt])
        self.has_early = _came_from_prefill([prompt], found)

    def alone(self, prompts: Sequence[list[int]]) -> float:
        """Prefill's seconds, nothing being handed over."""
        found: serving.Answers = self._prefill.ask(prompts, [{}] * len(prompts), len(prompts), 1)
        return float(found.seconds)

    def sequential(self, prompts: Sequence[list[int]]) -> tuple[float, float]:
        """Seconds until decode's (last) first token, and those of prefill."""
        start = time.perf_counter()
        computed = self._prefill.ask(prompts, [serving.PREFILL] * len(prompts), len(prompts), 1)
        tickets = [answer.ticket or {} for answer in computed.each]
        found = self._decode.ask(prompts, tickets, len(prompts), 1)
        seconds = time.perf_counter() - start
        self._take(prompts, found)
        return seconds, computed.seconds

    def early(self, prompts: Sequence[list[int]]) -> tuple[float, float]:
        """The same the early way."""
        start = time.perf_counter()
        found, (end, computed) = self._both_legs(prompts)
        self._take(prompts, found)
        return end - start, computed

    def _both_legs(
        self, prompts: Sequence[list[int]]
    ) -> tuple[serving.Answers, tuple[float, float]]:
        """Send each prompt to both engines at once, with a room of its own.

        Returns:
            Decode's answers; and the time when they had come, with the seconds of prefill.
        """
        rooms = [f"bench-{os.getpid()}-{next(_rooms)}" for _ in prompts]
        sides = (
            (self._prefill, {"do_remote_decode": True, "do_remote_prefill": False}),
            (self._decode, {"do_remote_decode": False, "do_remote_prefill": True} | self._address),
        )
        for engine, params in sides:
            each = [params | {"transfer_id": room} for room in rooms]
            engine.begin(prompts, each, len(prompts), 1)
        found = self._decode.answers()
        end = time.perf_counter()
        return found, (end, self._prefill.answers().seconds)

    def _take(self, prompts: Sequence[list[int]], found: serving.Answers) -> None:
        if not _came_from_prefill(prompts, found):
            reasons = {answer.reason for answer in found.each}
            raise SystemExit(f"{found.pulled:.0f} tokens were pulled, and it ended by {reasons}")


def _came_from_prefill(prompts: Sequence[list[int]], found: serving.Answers) -> bool:
    ended = {answer.reason for answer in found.each} == {"length"}
    return ended and found.pulled >= sum(map(len, prompts))


Measure = Callable[[Sequence[list[int]]], tuple[float, float] | float]


def by_turns(rounds: int, ways: Sequence[Measure], prompts: Sequence[list[int]]) -> common.Times:
    """What each way took, as its measurements have it: (ways, rounds, 2)."""

    def one(way: Measure) -> common.Way:
        def run() -> Sequence[float]:
            found = way(prompts)
            return found if isinstance(found, tuple) else (found, found)

        return run

    return common.by_turns(rounds, [one(way) for way in ways])


def throttled(pair: Pair, prompt: list[int], rate: float, rounds: int) -> Iterator[rows.Row]:
    """The time to the first token, beside what the formula says."""
    ways: list[Measure] = [pair.alone, pair.sequential]
    if pair.has_early:
        ways.append(pair.early)
    found = by_turns(rounds, ways, [prompt])[:, :, 0]
    moving, chunks = len(prompt) * TOKEN_NBYTES / rate, -(-len(prompt) // CHUNK)
    alone, sequential = found[0], found[1]
    section = TIME.format(len(prompt), rate / 1e6)
    print(
        f"prefill takes {np.median(alone):.2f} s, moving {moving:.2f} s at {rate / 1e6:.3g} MB/s; "
        f"{chunks} chunks",
        flush=True,
    )
    yield _row(section, "one after the other", sequential, alone + moving, "T_p + X")
    if pair.has_early:
        at_once = np.maximum(alone + moving / chunks, moving + alone / chunks)
        yield _row(section, "early", found[2], at_once, "T_p + X/n", FORMULA)
        yield _row(section, "early", found[2], sequential, "time one after the other")


def not_throttled(pair: Pair, rounds: int) -> Iterator[rows.Row]:
    """Short prompts, as fast as loopback moves them."""
    for tokens in SHORT:
        ways = (pair.early, pair.sequential)
        early, sequential = by_turns(rounds, ways, [_prompt(tokens)])[:, :, 0]
        case = f"early, {tokens} tokens"
        yield _row(FAST, case, early, sequential, "time one after the other", NO_SLOWER)


def prefill_alone(pair: Pair, rounds: int) -> rows.Row:
    """What prefill takes for prompts that are read while it computes, and afterwards."""
    prompts = [_prompt(LOAD_TOKENS, seed) for seed in range(LOAD_PROMPTS)]
    early, sequential = by_turns(rounds, (pair.early, pair.sequential), prompts)[:, :, 1]
    return _row(PREFILL, "early", early, sequential, "time one after the other", NO_SLOWER)


def _row(
    section: str,
    case: str,
    ours: common.Times,
    theirs: common.Times,
    of: str,
    target: str | None = None,
) -> rows.Row:
    return rows.compared(
        common.ratio(ours, theirs),
        section=section,
        case=case,
        measured=float(f"{np.median(ours) * 1e3:.4g}"),
        unit="ms",
        of=of,
        target=target,
    )


def _prompt(tokens: int, seed: int = 0) -> list[int]:
    from examples.tiny_llama import prompt

    return prompt(tokens, seed)


def _install_driver(folder: Path) -> None:
    """Let this process, and those that it starts, find the driver that keeps to a rate."""
    from tests.cli.command import install_drivers

    folder.mkdir()
    os.environ["PYTHONPATH"] = install_drivers(folder, MODULE, **{DRIVER: "ThrottledTransport"})[
        "PYTHONPATH"
    ]
    sys.path.append(str(folder))


def _rate(fleet: Fleet, prompt: list[int]) -> float:
    """The bytes per second at which moving the prompt takes half as long as computing it."""
    alone = [fleet.prefill.ask([prompt], [{}], 1, 1).seconds for _ in range(3)]
    return 2 * len(prompt) * TOKEN_NBYTES / float(np.median(alone[1:]))


def main() -> None:
    options = _options()
    if find_spec("vllm") is None:
        rows.nothing("vLLM is not installed here")
    with ExitStack() as stack, rows.progress(5) as show:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        _install_driver(folder / "drivers")
        serving.prepare(str(folder))
        show("starting the engine that prefills")
        serving.make_model(folder / "model", max_tokens=MOST_TOKENS, **SHAPE)
        fleet, prompt = Fleet(folder, stack), _prompt(options.prompt)
        rate = options.rate * 1e6 if options.rate else _rate(fleet, prompt)
        show(f"starting an engine that reads {rate / 1e6:.3g} MB/s")
        slow = fleet.decode("throttled", {"bytes_per_second": rate})
        pair, found = Pair(fleet.prefill, slow), list[rows.Row]()
        with turn(slow):
            pair.find_early(_prompt(2 * CHUNK))
            show(f"{options.prompt} tokens by turns")
            found += throttled(pair, prompt, rate, options.rounds)
            if pair.has_early:
                show(f"{LOAD_PROMPTS} prompts at once")
                found.append(prefill_alone(pair, options.rounds))
        if pair.has_early:
            show("short prompts, not throttled")
            fast = fleet.decode("not-throttled", {})
            pair = Pair(fleet.prefill, fast)
            with turn(fast):
                pair.find_early(_prompt(2 * CHUNK))
                found += not_throttled(pair, 4 * options.rounds)
        else:
            print("early tickets: these engines have none; only the sequential way was measured")
    rows.show(found)
    rows.write(options.json, found)


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument(
        "--rate",
        type=float,
        metavar="MB/S",
        help="of decode's reads, such as 40; default: moving takes half of prefill's time",
    )
    parser.add_argument("--rounds", type=int, help="default 10")
    parser.add_argument("--prompt", type=int, help="tokens; default 3840, of chunks of 256")
    parser.add_argument("--quick", action="store_true", help="to see that it runs: a minute")
    found = parser.parse_args()
    found.rounds = found.rounds or (1 if found.quick else 10)
    found.prompt = found.prompt or (3 * CHUNK if found.quick else 15 * CHUNK)
    if not CHUNK < found.prompt < MOST_TOKENS:
        parser.error(f"--prompt {found.prompt}: from {CHUNK + 1} to {MOST_TOKENS - 1}")
    if found.rate is not None and not found.rate > 0:
        parser.error(f"--rate {found.rate}: more than 0 MB/s")
    return found


if __name__ == "__main__":
    main()
