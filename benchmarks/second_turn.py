"""Conversations behind a proxy: the time to the first token, with and without decode's tickets.

    python -m benchmarks.second_turn [--rounds 12] [--quick] [--json FILE]

Two pairs of vLLM's HTTP servers with KVFerryConnector, one with ``bidirectional_kv_xfer``, each
behind ``disagg_proxy_multiturn.py`` of vLLM's source distribution, of which a copy translates
streamed responses (``tests/long/routers/adapted_proxy.py``). The client is that of vLLM's
``benchmark_serving_multi_turn.py``: the same conversations of four turns by turns through either
proxy. The time to the first token is from a request to the first streamed chunk with text, through
proxy, prefill and decode.

vLLM steps an engine as long as it holds anything, which takes a core from the others here. So
decode holds an answer for three seconds only, and the next conversation begins when all engines
have nothing left. Every round ends with a look at what vLLM counted: with tickets, prefill has
computed no token of a later turn but the new ones; without, it has computed the answers, too.

It needs vLLM's CPU build, and vLLM's source distribution, which is fetched if it is not in
``.cache/vllm-next``.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness, serving
from benchmarks.harness import Row, Way, WorkerProcess, row
from benchmarks.multi_turn_client import Client
from tests.long.routers.checks import nothing_left
from tests.long.routers.deployment import HEALTH, MULTI_TURN, Servers, proxy

CLIENT = Path("benchmarks/multi_turn")  # a folder of vLLM's source distribution

TURNS = 4
FIRST_TOKENS, NEXT_TOKENS, ANSWER_TOKENS = 128, 32, 208
"""Of the user's first message, of each later one, and of each answer."""
BLOCK_TOKENS, BLOCKS, MOST_TOKENS = 32, 2048, 2048
LAYERS, KV_HEADS, HEAD_DIM = 6, 2, 64
SHAPE = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_size": 512,
    "intermediate_size": 2048,
}
OPTIONS = {
    "block_size": BLOCK_TOKENS,
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": BLOCKS * BLOCK_TOKENS * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4,
    "num_gpu_blocks_override": BLOCKS,
    "max_model_len": MOST_TOKENS,
    "override_generation_config": {"temperature": 0},
}
WITH_TICKETS = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 3.0}
BOTH = {"kv_role": "kv_both", "kv_load_failure_policy": "fail"}

SECTION = "time to the first token in conversations, vLLM on a CPU"
OF = "time without bidirectional_kv_xfer"
Conversation = list[dict[str, str]]


class Pair:
    """Two servers behind a proxy, which end with ``stack``."""

    def __init__(
        self, name: str, folder: Path, source: Path, extra: dict[str, Any], stack: ExitStack
    ) -> None:
        self.name, self._source, self._stack = name, source, stack
        self._folder = folder / name.replace(" ", "-")
        self._folder.mkdir()
        sides = {"prefill": BOTH, "decode": BOTH}
        self._servers = Servers(folder / "model", self._folder, sides, extra=extra, options=OPTIONS)
        stack.callback(self._servers.close)

    def started(self) -> None:
        """Wait until it serves."""
        from tests.long.routers.adapted_proxy import adapted

        self._servers.wait_started()
        script = adapted(self._source / MULTI_TURN, self._folder)
        self._proxy = proxy(script, HEALTH[MULTI_TURN], self._servers, self._folder)
        self._stack.callback(self._proxy.close)
        self._proxy.wait_started()

    def converse(self, client: WorkerProcess, number: int) -> list[float]:
        """Have a conversation; seconds to the first token of each turn, and for a further one."""
        before, tickets = self._computed(), self.name == "with tickets"
        asked = {f"{number}, {self.name}": conversation(number)}
        stats = client.ask("run", self._proxy.address, asked)
        stats.sort(key=lambda each: int(each["input_num_turns"]))
        if [each["output_num_tokens"] for each in stats] != [ANSWER_TOKENS] * TURNS:
            raise SystemExit(f"answers have other lengths: {stats}")
        tokens = int(self._computed() - before)
        if tokens not in computed(tickets):
            raise SystemExit(f"{self.name}: prefill has computed {tokens} tokens")
        nothing_left(self._servers)
        further = float(np.median([each["tpot_ms"] for each in stats]))
        return [each["ttft_ms"] / 1e3 for each in stats] + [further / 1e3]

    def _computed(self) -> float:
        prefill = self._servers["prefill"]
        return prefill.counter("vllm:prompt_tokens_by_source", 'source="local_compute"')


def conversation(number: int) -> Conversation:
    """The user's messages, and placeholders as long as the answers are to be."""
    from examples.tiny_llama import WORDS, prompt

    def text(tokens: int, seed: int) -> str:
        return " ".join(WORDS[token] for token in prompt(tokens, seed))

    found = []
    for turn in range(TURNS):
        length = NEXT_TOKENS if turn else FIRST_TOKENS
        found.append({"role": "user", "content": text(length, number * TURNS + turn)})
        found.append({"role": "assistant", "content": text(ANSWER_TOKENS, 0)})
    return found


def computed(tickets: bool) -> range:
    """How many tokens prefill computes for a conversation, at least and at most.

    The chat template adds one before each answer. The prefix cache of prefill has whole blocks
    only, and of an answer's last token there may be no cache.
    """
    user = FIRST_TOKENS + 1 + (TURNS - 1) * (NEXT_TOKENS + 1)
    if tickets:
        return range(user, user + TURNS)
    answers = (TURNS - 1) * ANSWER_TOKENS
    return range(user + answers, user + answers + (TURNS - 1) * BLOCK_TOKENS + 1)


def table(found: harness.Times) -> Iterator[Row]:
    """Rows of the seconds to the first token of each turn, and for a further token."""
    first, later = found[:, :, :TURNS], np.median(found[:, :, 1:TURNS], axis=2)
    cases: list[tuple[str, harness.Times, str | None]] = [
        (f"turns 2 to {TURNS}", later, "≤ 0.7"),
        ("turn 1", first[:, :, 0], "≤ 1.1"),
        *((f"turn {turn + 1}", first[:, :, turn], None) for turn in range(1, TURNS)),
        ("every further token", found[:, :, TURNS], None),
    ]
    for case, (ours, theirs), target in cases:
        yield row(SECTION, case, OF, ours, theirs, unit="ms", target=target)


def vllm_source() -> Path:
    """vLLM's source distribution, of the installed version."""
    from tests.integrations.vllm.next_version.sdist import SdistError, fetch
    from tests.integrations.vllm.next_version.source import Source
    from tests.vllm.caches.census import installed

    version = Source(installed()).version
    try:
        return fetch("vllm", version, serving.ROOT / ".cache" / "vllm-next")
    except SdistError as exc:
        print(f"the source of vLLM {version} was not fetched: {exc}", flush=True)
        raise SystemExit(harness.NOTHING) from exc


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Both pairs by turns, each in the same conversation."""
    harness.need_vllm()
    rounds = options.rounds or (1 if options.quick else 12)
    with ExitStack() as stack:
        harness.say("starting two pairs of servers")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        source = vllm_source()
        serving.prepare(str(folder))
        serving.make_model(folder / "model", max_tokens=MOST_TOKENS, **SHAPE)
        settings: dict[str, dict[str, Any]] = {"with tickets": WITH_TICKETS, "without": {}}
        pairs = [Pair(name, folder, source, extra, stack) for name, extra in settings.items()]
        for pair in pairs:
            pair.started()
        make = partial(Client, source / CLIENT, folder / "model", folder / "client.log")
        client = stack.enter_context(WorkerProcess(make))

        def conversed(pair: Pair) -> Way:
            numbers = itertools.count()

            def way() -> list[float]:
                number = next(numbers)
                harness.say(f"conversation {number + 1}, {pair.name}")
                return pair.converse(client, number)

            return way

        try:
            found = harness.by_turns([conversed(pair) for pair in pairs], rounds)
        except SystemExit:
            print((folder / "client.log").read_text(errors="replace")[-3000:], flush=True)
            raise
        yield from table(found)


if __name__ == "__main__":
    harness.main(
        measure, __doc__, ("--rounds", {"type": int, "help": "default 12, of 20 seconds each"})
    )
