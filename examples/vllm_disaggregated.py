"""Prefill on one vLLM engine, decode on another: kvferry moves the KV cache between them.

    python examples/vllm_disaggregated.py [DRIVER]

The engines are real, each in a process of its own, but the demo needs neither a GPU nor a download:
it uses vLLM's CPU build, a tiny Llama that it makes itself, and the driver loopback unless another
driver is named. It ends with status 0 only if every text is the one that a single ordinary engine
gives, every prompt token came through the transfer, and a ticket that belongs to another prompt is
refused.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self

sys.path.insert(0, str(Path(__file__).parent))  # the engines' processes import this file by name
import tiny_llama

# How many tokens the prompts have. A block has 32; some prompts fill their last block, some do not.
LENGTHS = (5, 16, 31, 32, 33, 64, 100, 255, 256, 300, 511)
TOKENS_TO_GENERATE = 24

# What vLLM's CPU build needs on one small machine.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TQDM_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine and its API are one process, not two
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
ENGINE = {
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 1024,
    "num_gpu_blocks_override": 512,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
}

# This is all that an engine needs to take part. With this "kv_load_failure_policy", what cannot be
# loaded is an error, so that no cache that failed to load is silently computed again.
DRIVER = sys.argv[1] if len(sys.argv) > 1 else "loopback"
TRANSFER = {
    "kv_connector": "KVFerryConnector",
    "kv_connector_extra_config": {"driver": DRIVER},
    "kv_load_failure_policy": "fail",
}
PREFILL = TRANSFER | {"kv_role": "kv_producer"}
DECODE = TRANSFER | {"kv_role": "kv_consumer"}
# Never in production: this decode engine does not check that a ticket belongs to the prompt.
CREDULOUS = DECODE | {"kv_connector_extra_config": {"driver": DRIVER, "verify_prompt": False}}

# What a router sends along with a request that another engine will decode ...
FOR_ANOTHER_ENGINE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# ... and what comes back is the ticket, which goes with the same prompt to the decode engine.
Ticket = dict[str, Any]


class Answer(NamedTuple):
    """An engine's answer to one request, with a ticket if another engine will decode it."""

    tokens: list[int]
    finish_reason: str
    ticket: Ticket | None


# In the engines' processes.


def serve(pipe: Connection, model: str, transfer: dict[str, Any] | None, log: str) -> None:
    """Run a vLLM engine (``vllm.LLM``, without ``transfer`` an ordinary one) behind a pipe.

    It sends "ready", then what ``generate`` and ``figures`` return for each list of requests that
    it gets. ``None`` instead of requests ends it.
    """
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from vllm import LLM
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(**transfer) if transfer else None
    llm = LLM(model=model, kv_transfer_config=config, **ENGINE)
    pipe.send("ready")
    while (requests := pipe.recv()) is not None:
        pipe.send((generate(llm, requests), figures(llm)))


def generate(llm: Any, requests: Sequence[tuple[list[int], int, Ticket | None]]) -> list[Answer]:
    """Return an engine's greedy answers to requests.

    A request is its prompt's token ids, how many tokens to generate, and its
    ``kv_transfer_params``: a ticket, ``FOR_ANOTHER_ENGINE``, or ``None``.
    """
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": ticket} if ticket else None,
        )
        for _, max_tokens, ticket in requests
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt, _, _ in requests]
    return [
        Answer(
            tokens=list(output.outputs[0].token_ids),
            finish_reason=str(output.outputs[0].finish_reason),
            ticket=output.kv_transfer_params,
        )
        for output in llm.generate(prompts, params, use_tqdm=False)
    ]


def figures(llm: Any) -> Counter[str]:
    """Return what vLLM and kvferry's connector have counted in an engine so far."""
    found: Counter[str] = Counter()
    for metric in llm.get_metrics():
        if metric.name == "vllm:prompt_tokens_by_source":
            if metric.labels.get("source") == "external_kv_transfer":
                found["tokens"] += metric.value
        elif metric.name == "vllm:kvferry_bytes":
            found["bytes"] += metric.value
        elif metric.name == "vllm:kvferry_load_seconds":
            found["seconds"] += metric.sum
    return found


# In the process that plays the router.


class Engine:
    """An engine in a process of its own, as the router sees it."""

    def __init__(self, name: str, model: Path, transfer: dict[str, Any] | None = None) -> None:
        """Begin to start it; ``wait_ready`` returns when it has started."""
        self.figures: Counter[str] = Counter()  # after its last answer
        self._name, self._log = name, model.parent / f"{name}.log"
        self._pipe, theirs = multiprocessing.Pipe()
        # Forked from a process that has imported vLLM, which takes longer than to start an engine.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["vllm"])
        arguments = (theirs, str(model), transfer, str(self._log))
        self._process = context.Process(target=serve, args=arguments)
        self._process.start()
        theirs.close()

    def wait_ready(self) -> Self:
        """Wait until it has started; exit with the end of its log if it ends instead."""
        self._receive()
        return self

    def ask(self, *requests: tuple[list[int], int, Ticket | None]) -> list[Answer]:
        """Send requests to the engine all at once, and wait for all answers."""
        self._pipe.send(requests)
        answers, self.figures = self._receive()
        return list(answers)

    def prefill(self, *prompts: list[int]) -> list[Ticket]:
        """Have the engine compute prompts' KV caches for another engine, and return the tickets."""
        answers = self.ask(*((prompt, 1, FOR_ANOTHER_ENGINE) for prompt in prompts))
        return [answer.ticket or {} for answer in answers]

    def decode(self, prompts: list[list[int]], tickets: Sequence[Ticket | None]) -> list[Answer]:
        """Have the engine generate text; without a ticket, it computes the cache itself."""
        pairs = zip(prompts, tickets, strict=True)
        return self.ask(*((prompt, TOKENS_TO_GENERATE, ticket) for prompt, ticket in pairs))

    def close(self) -> None:
        """End it."""
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join(15)
        self._process.kill()
        self._process.join()

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            end = self._log.read_text(errors="replace")[-3000:]
            raise SystemExit(f"the {self._name} engine ended:\n{end}") from None


def hand_over(
    prefill: Engine, decode: Engine, prompts: list[list[int]], texts: list[list[int]]
) -> bool:
    """Hand prompts over all at once; show what moved, and return whether the texts are these."""
    before = decode.figures
    answers = decode.decode(prompts, prefill.prefill(*prompts))
    found, tokens = decode.figures - before, sum(map(len, prompts))
    same = [answer.tokens for answer in answers] == texts
    print(
        f"{len(prompts):7}{tokens:15,}{found['tokens']:15,.0f}{found['bytes']:12,.0f}"
        f"{found['seconds'] * 1e3:9.1f}   {'as of one engine' if same else 'ANOTHER TEXT'}"
    )
    return same and found["tokens"] == tokens


def hand_over_all(ordinary: Engine, prefill: Engine, decode: Engine) -> bool:
    """Hand over each prompt alone, then all of them at once."""
    prompts = [tiny_llama.prompt(length) for length in LENGTHS]
    texts = [answer.tokens for answer in ordinary.decode(prompts, [None] * len(prompts))]
    print("prompts  prompt tokens  tokens pulled       bytes       ms   text")
    right = [
        hand_over(prefill, decode, [prompt], [text])
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    return all([*right, hand_over(prefill, decode, prompts, texts)])


def checks_of_swaps(
    ordinary: Engine, prefill: Engine, decode: Engine, credulous: Engine
) -> dict[str, bool]:
    """Return whether a prompt with another prompt's ticket is refused, and makes a difference.

    The credulous engine must answer with the other text, which shows that the cache decides.
    """
    # The prompts differ, but not in their last token, which decode always computes itself.
    mine, other = tiny_llama.prompt(128, seed=1), tiny_llama.prompt(128, seed=2)
    mine[-1] = other[-1]
    [text_of_mine, text_of_other] = ordinary.decode([mine, other], [None, None])
    [refused] = decode.decode([mine], prefill.prefill(other))
    [believed] = credulous.decode([mine], prefill.prefill(other))
    return {
        "a ticket of another prompt is refused, and the engine serves on": (
            refused.finish_reason == "error"
            and hand_over(prefill, decode, [mine], [text_of_mine.tokens])
        ),
        "control: with verify_prompt off, prompt X decoded with Y's cache gives Y's text: it is "
        "the cache that decides": believed.tokens == text_of_other.tokens != text_of_mine.tokens,
    }


def run(folder: Path) -> bool:
    """Run the demo, and return whether everything was as it should be."""
    print("making a tiny Llama, and starting four vLLM engines (half a minute to two)", flush=True)
    model = tiny_llama.build(folder / "tiny-llama")
    with (
        closing(Engine("ordinary", model)) as ordinary,
        closing(Engine("prefill", model, PREFILL)) as prefill,
        closing(Engine("decode", model, DECODE)) as decode,
        closing(Engine("unverified", model, CREDULOUS)) as credulous,
    ):
        engines = [each.wait_ready() for each in (ordinary, prefill, decode, credulous)]
        what = "every text is that of one ordinary engine, and every prompt token was pulled"
        checks = {what: hand_over_all(ordinary, prefill, decode)} | checks_of_swaps(*engines)
    for what, holds in checks.items():
        print(f"{'yes' if holds else 'NO '} {what}")
    return all(checks.values())


def main() -> int:
    """Run the demo in a temporary folder, and return the process's exit status."""
    os.environ.update(ENVIRONMENT)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvferry-demo"
    os.environ.setdefault("VLLM_CACHE_ROOT", str(cache))
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as folder:
        os.environ["TMPDIR"] = folder  # vLLM leaves files there
        return 0 if run(Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
