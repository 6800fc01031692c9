"""Conversations behind a proxy: the time to the first token, with and without decode's tickets.

    python -m benchmarks.second_turn [--rounds 12] [--quick] [--json FILE]

Two pairs of vLLM's HTTP servers with KVFerryConnector (signed tickets, prefix caching, a model of
random weights), one with ``bidirectional_kv_xfer``, each behind ``disagg_proxy_multiturn.py`` of
vLLM's source distribution. The client is that of ``benchmark_serving_multi_turn.py``, from there,
too: conversations of four turns with ``--send-conversation-id``, one after the other, the same ones
by turns through either proxy. Its time to the first token is from a request to the first streamed
chunk with text, through proxy, prefill and decode.

vLLM 0.32 streams decode's ticket from its Responses API only, and 0.33 in the last chunk of a chat
completion, as the proxy expects. So a copy of the proxy asks decode for streamed responses, and
translates them (``tests/long/routers/adapted_proxy.py``), for both pairs. A client
waits as long as it would with 0.33, and for the translation, some tenths of a millisecond.

vLLM steps an engine as long as it holds anything, also if it has nothing to do, which takes a core
from the others here. So decode holds an answer for three seconds only, and the next conversation
begins when all engines have nothing left.

Every round ends with a look at what vLLM counted: with tickets, prefill has computed no token of a
later turn but the new ones; without, it has computed the answers, too.

It needs vLLM's CPU build, and vLLM's source distribution, which is fetched if it is not in
``.cache/vllm-next``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness, serving
from benchmarks.harness import Row, row
from tests.long.routers.checks import nothing_left
from tests.long.routers.deployment import HEALTH, MULTI_TURN, Servers, proxy

HERE = Path(__file__).parent
CLIENT = Path("benchmarks/multi_turn")
"""A folder of vLLM's source distribution."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Of each turn: seconds to the first token, and for each token then."""

    first: list[float]
    each: list[float]


class Client:
    """The process of ``multi_turn_client.py``."""

    def __init__(self, source: Path, model: Path, log: Path, stack: ExitStack) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, HERE / "multi_turn_client.py", source / CLIENT, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stack.enter_context(log.open("w")),
            text=True,
        )
        stack.callback(self._close)

    def started(self) -> None:
        """Wait until it takes conversations."""
        self._receive()

    def run(self, url: str, name: str, conversation: Conversation) -> Run:
        """Have one conversation."""
        asked = {"url": url, "conversations": {name: conversation}}
        if self._process.stdin is not None:
            print(json.dumps(asked), file=self._process.stdin, flush=True)
        stats = sorted(self._receive(), key=lambda each: int(each["input_num_turns"]))
        if [each["output_num_tokens"] for each in stats] != [ANSWER_TOKENS] * TURNS:
            raise SystemExit(f"answers have other lengths: {stats}; {self._end()}")
        return Run(
            first=[each["ttft_ms"] / 1e3 for each in stats],
            each=[each["tpot_ms"] / 1e3 for each in stats],
        )

    def _receive(self) -> Any:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise SystemExit(f"the client has ended; {self._end()}")
        return json.loads(line)

    def _end(self) -> str:
        return f"its log ends with:\n{self._log.read_text(errors='replace')[-3000:]}"

    def _close(self) -> None:
        self._process.communicate()


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

    def converse(self, client: Client, name: str, conversation: Conversation) -> tuple[Run, int]:
        """Have one conversation; what it took, and how many tokens prefill computed for it."""
        before = self._computed()
        run = client.run(self._proxy.address, f"{name}, {self.name}", conversation)
        tokens = int(self._computed() - before)
        nothing_left(self._servers)
        return run, tokens

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
        yield row(SECTION, case, OF, ours, theirs, unit="ms", scale=1e3, target=target)


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
    if find_spec("vllm") is None:
        harness.nothing("vLLM is not installed here")
    rounds = options.rounds or (1 if options.quick else 12)
    with ExitStack() as stack:
        harness.say("starting two pairs of servers")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        source = vllm_source()
        serving.prepare(str(folder))
        serving.make_model(folder / "model", max_tokens=MOST_TOKENS, **SHAPE)
        client = Client(source, folder / "model", folder / "client.log", stack)
        settings: dict[str, dict[str, Any]] = {"with tickets": WITH_TICKETS, "without": {}}
        pairs = [Pair(name, folder, source, extra, stack) for name, extra in settings.items()]
        for pair in pairs:
            pair.started()
        client.started()
        ways = [partial(_conversed, pair, client, itertools.count()) for pair in pairs]
        yield from table(harness.by_turns(ways, rounds))


def _conversed(pair: Pair, client: Client, numbers: Iterator[int]) -> list[float]:
    """Have the next conversation, and check how many tokens prefill has computed for it."""
    number = next(numbers)
    harness.say(f"conversation {number + 1}, {pair.name}")
    run, tokens = pair.converse(client, f"{number}", conversation(number))
    if tokens not in computed(pair.name == "with tickets"):
        raise SystemExit(f"{pair.name}: prefill has computed {tokens} tokens")
    return [*run.first, float(np.median(run.each))]


if __name__ == "__main__":
    harness.main(
        measure, __doc__, ("--rounds", {"type": int, "help": "default 12, of 20 seconds each"})
    )
