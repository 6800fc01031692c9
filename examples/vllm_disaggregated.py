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
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))  # the engines' processes import this file by name
import tiny_llama

# How many tokens the prompts have. A block has 32; some prompts fill their last block, some do not.
LENGTHS = (5, 16, 31, 32, 33, 64, 100, 255, 256, 300, 511)
TOKENS_TO_GENERATE = 24
START_SECONDS = 300.0

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

console = Console()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An engine's answer to one request, with a ticket if another engine will decode it."""

    tokens: list[int]
    finish_reason: str
    ticket: Ticket | None


@dataclass(kw_only=True)
class Row:
    """A row of the table: prompts that were handed over together."""

    what: str
    prompt_tokens: int
    counted: Counter[str]  # by the decode engine meanwhile, as of ``figures``
    same: bool  # whether every text was that of the ordinary engine


# In the engines' processes.


def serve(pipe: Connection, model: str, transfer: dict[str, Any] | None, log: str) -> None:
    """Run a vLLM engine (``vllm.LLM``, without ``transfer`` an ordinary one) behind a pipe.

    It sends "ready", then an answer, what ``generate`` and ``figures`` return, for each list of
    requests that it gets. ``None`` instead of requests ends it.
    """
    if not Path(log).exists():
        return  # the demo was interrupted before this process began
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
                found["pulled_tokens"] += metric.value
        elif metric.name == "vllm:kvferry_bytes":
            found["nbytes"] += metric.value
        elif metric.name == "vllm:kvferry_load_seconds":
            found["seconds"] += metric.sum
    return found


# In the process that plays the router.


@dataclass(kw_only=True)
class Engine:
    """An engine in a process of its own, as the router sees it."""

    name: str
    process: Any
    pipe: Connection
    log: Path
    figures: Counter[str] = field(default_factory=Counter)  # after its last answer

    @property
    def ready(self) -> bool:
        """Whether the engine has started; to be asked until it is true, and no longer."""
        if self.process.is_alive() and not self.pipe.poll():
            return False
        self.receive()
        return True

    def ask(self, *requests: tuple[list[int], int, Ticket | None]) -> list[Answer]:
        """Send requests to the engine all at once, and wait for all answers."""
        self.pipe.send(requests)
        answers, self.figures = self.receive()
        return list(answers)

    def prefill(self, *prompts: list[int]) -> list[Ticket]:
        """Have the engine compute prompts' KV caches for another engine, and return the tickets."""
        answers = self.ask(*((prompt, 1, FOR_ANOTHER_ENGINE) for prompt in prompts))
        return [answer.ticket or {} for answer in answers]

    def decode(self, prompts: list[list[int]], tickets: Sequence[Ticket | None]) -> list[Answer]:
        """Have the engine generate text; without a ticket, it computes the cache itself."""
        pairs = zip(prompts, tickets, strict=True)
        return self.ask(*((prompt, TOKENS_TO_GENERATE, ticket) for prompt, ticket in pairs))

    def receive(self) -> Any:
        """Wait for the engine's next message, and return it; exit if the engine has ended."""
        while self.process.is_alive():
            if self.pipe.poll(0.2):
                return self.pipe.recv()
        end = self.log.read_text(errors="replace")[-3000:]
        raise SystemExit(f"the {self.name} engine ended:\n{end}")


def end(engines: Sequence[Engine], seconds: float) -> None:
    """Tell engines to end, and kill those that have not ended in time."""
    for engine in engines:
        with suppress(OSError):
            engine.pipe.send(None)
    until = time.monotonic() + seconds
    for engine in engines:
        engine.process.join(max(until - time.monotonic(), 0.0))
        engine.process.kill()
        engine.process.join()


def fork_server() -> Any:
    """Return a multiprocessing context whose processes are forked from one that has imported vLLM.

    Importing takes longer than starting an engine. The fork server starts with SIGINT blocked, and
    so do the engines: on Ctrl-C, only this process is interrupted, and ends the engines.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm"])
    resource_tracker.ensure_running()  # it unblocks the signal when it starts
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return context


def start(name: str, model: Path, transfer: dict[str, Any] | None) -> Engine:
    """Start an engine, and return it without waiting until it is ``ready``."""
    ours, theirs = multiprocessing.Pipe()
    log = model.parent / f"{name}.log"
    log.touch()
    process = fork_server().Process(
        target=serve, args=(theirs, str(model), transfer, str(log)), name=name
    )
    process.start()
    theirs.close()
    return Engine(name=name, process=process, pipe=ours, log=log)


def wait_until_ready(engines: Sequence[Engine]) -> None:
    """Wait until all engines have started, and show which are still starting; exit if one ends."""
    began, waiting = time.monotonic(), list(engines)
    console.print(f"starting {len(engines)} vLLM engines (half a minute to two)")
    with console.status("") as status:
        while waiting:
            names = ", ".join(engine.name for engine in waiting)
            seconds = time.monotonic() - began
            status.update(f"{seconds:3.0f} s, starting: {names}")
            if seconds > START_SECONDS:
                raise SystemExit(f"not ready after {seconds:.0f} s: {names}")
            time.sleep(0.2)
            waiting = [engine for engine in waiting if not engine.ready]
    console.print(f"{len(engines)} vLLM engines started in {time.monotonic() - began:.0f} s")


def hand_over(
    prefill: Engine, decode: Engine, prompts: list[list[int]], texts: list[list[int]], what: str
) -> Row:
    """Hand prompts over all at once, and compare with the texts of an ordinary engine."""
    before = decode.figures
    answers = decode.decode(prompts, prefill.prefill(*prompts))
    return Row(
        what=what,
        prompt_tokens=sum(map(len, prompts)),
        counted=decode.figures - before,
        same=[answer.tokens for answer in answers] == texts,
    )


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    table = Table(
        title="KV cache handed from the prefill engine to the decode engine",
        caption="milliseconds: from the start of a load to its end, added up over the prompts",
    )
    table.add_column("sent")
    for heading in ("prompt\ntokens", "tokens\npulled", "bytes", "milli-\nseconds"):
        table.add_column(heading, justify="right")
    table.add_column("same text as one\nordinary engine")
    for row in rows:
        table.add_row(
            row.what,
            f"{row.prompt_tokens:,}",
            f"{row.counted['pulled_tokens']:,.0f}",
            f"{row.counted['nbytes']:,.0f}",
            f"{row.counted['seconds'] * 1e3:,.1f}",
            "[green]yes" if row.same else "[red]NO",
        )
    console.print(table)


def start_all(folder: Path) -> dict[str, Engine]:
    """Start an ordinary engine and three that hand caches over, all with one tiny Llama."""
    console.print("building a tiny Llama (a few seconds)")
    with console.status("building a tiny Llama"):
        model = tiny_llama.build(folder / "tiny-llama")
    roles = {"ordinary": None, "prefill": PREFILL, "decode": DECODE, "unverified": CREDULOUS}
    engines: dict[str, Engine] = {}
    try:
        for name, transfer in roles.items():
            engines[name] = start(name, model, transfer)
        wait_until_ready(list(engines.values()))
    except BaseException:
        end(list(engines.values()), 0.0)
        raise
    return engines


def hand_over_all(ordinary: Engine, prefill: Engine, decode: Engine) -> list[Row]:
    """Hand over each prompt alone, then all of them at once; return a row for each hand-over."""
    prompts = [tiny_llama.prompt(length) for length in LENGTHS]
    answers = ordinary.decode(prompts, [None] * len(prompts))
    texts = [answer.tokens for answer in answers]
    rows = [
        hand_over(prefill, decode, [prompt], [text], "alone")
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    return [*rows, hand_over(prefill, decode, prompts, texts, f"all {len(prompts)} at once")]


def checks_of(rows: Sequence[Row]) -> dict[str, bool]:
    """Return whether the rows show what they should."""
    pulled = (row.counted["pulled_tokens"] == row.prompt_tokens for row in rows)
    return {
        "every text is that of one ordinary engine": all(row.same for row in rows),
        "every prompt token came through the transfer": all(pulled),
    }


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
    after = hand_over(prefill, decode, [mine], [text_of_mine.tokens], "alone")
    return {
        "a ticket of another prompt is refused, and the engine serves on": (
            refused.finish_reason == "error" and after.same
        ),
        "control: with verify_prompt off, prompt X decoded with Y's cache gives Y's text: it is "
        "the cache that decides": believed.tokens == text_of_other.tokens != text_of_mine.tokens,
    }


def run(folder: Path) -> bool:
    """Run the demo, and return whether everything was as it should be."""
    engines = start_all(folder)
    seconds = 0.0
    try:
        ordinary, prefill, decode, credulous = engines.values()
        rows = hand_over_all(ordinary, prefill, decode)
        show(rows)
        checks = checks_of(rows) | checks_of_swaps(ordinary, prefill, decode, credulous)
        for what, holds in checks.items():
            console.print(f"{'[green]yes' if holds else '[red]NO '}[/] {what}")
        seconds = 15.0
        return all(checks.values())
    finally:
        end(list(engines.values()), seconds)


def main() -> int:
    """Run the demo in a temporary folder, and return the process's exit status."""
    os.environ.update(ENVIRONMENT)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvferry-demo"
    os.environ.setdefault("VLLM_CACHE_ROOT", str(cache))
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as folder:
        os.environ["TMPDIR"] = folder  # vLLM leaves files there
        try:
            return 0 if run(Path(folder)) else 1
        except KeyboardInterrupt:
            console.print("interrupted; the engines have ended")
            return 130


if __name__ == "__main__":
    sys.exit(main())
