"""Prefill on one vLLM engine, decode on another: kvferry carries the KV cache between them.

    python examples/vllm_disaggregated.py [DRIVER]

Everything is real and nothing needs a GPU or a download: vLLM's CPU build, a tiny Llama made on the
spot, one process per engine, and the loopback driver unless another is named. It ends with status 0
only if every text is the one that a single ordinary engine gives, every prompt token came through
the transfer, and a ticket that belongs to another prompt is refused.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
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

# This is all that an engine needs to take part. "kv_load_failure_policy" is how this demo knows
# that nothing was quietly computed again: what cannot be loaded is an error.
DRIVER = sys.argv[1] if len(sys.argv) > 1 else "loopback"
TRANSFER = {
    "kv_connector": "KVFerryConnector",
    "kv_connector_module_path": "kvferry.integrations.vllm",
    "kv_connector_extra_config": {"driver": DRIVER},
    "kv_load_failure_policy": "fail",
}
PREFILL = TRANSFER | {"kv_role": "kv_producer"}
DECODE = TRANSFER | {"kv_role": "kv_consumer"}
# Never in production: this decode engine believes a ticket without comparing its prompt.
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
    """What an engine said to one request."""

    tokens: list[int]
    finish_reason: str
    ticket: Ticket | None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """An engine's counters, and what was added to them since earlier ones."""

    pulled_tokens: float = 0.0
    nbytes: float = 0.0
    seconds: float = 0.0

    def __sub__(self, earlier: Figures) -> Figures:
        return Figures(
            pulled_tokens=self.pulled_tokens - earlier.pulled_tokens,
            nbytes=self.nbytes - earlier.nbytes,
            seconds=self.seconds - earlier.seconds,
        )


@dataclass(kw_only=True)
class Row:
    """A line of the table."""

    what: str
    prompt_tokens: int
    figures: Figures
    same: bool


# In the engines' processes.


def serve(pipe: Connection, model: str, transfer: dict[str, Any] | None, log: str) -> None:
    """One vLLM engine, as ``vllm.LLM`` gives it to anybody, answering over a pipe."""
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
    """Greedy answers to (prompt, tokens to generate, kv_transfer_params)."""
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


def figures(llm: Any) -> Figures:
    """What vLLM and the connector have counted so far."""
    found = dict.fromkeys(("pulled_tokens", "nbytes", "seconds"), 0.0)
    for metric in llm.get_metrics():
        if metric.name == "vllm:prompt_tokens_by_source":
            if metric.labels.get("source") == "external_kv_transfer":
                found["pulled_tokens"] += metric.value
        elif metric.name == "vllm:kvferry_bytes":
            found["nbytes"] += metric.value
        elif metric.name == "vllm:kvferry_load_seconds":
            found["seconds"] += metric.sum
    return Figures(**found)


# In the process that plays the router.


@dataclass(kw_only=True)
class Engine:
    """An engine in a process of its own."""

    name: str
    process: Any
    pipe: Connection
    log: Path
    figures: Figures = field(default_factory=Figures)

    @property
    def ready(self) -> bool:
        """Whether it serves. Raises if it ended instead."""
        if self.process.is_alive() and not self.pipe.poll():
            return False
        self.receive()
        return True

    def ask(self, *requests: tuple[list[int], int, Ticket | None]) -> list[Answer]:
        """All requests at once; returns when all are answered."""
        self.pipe.send(requests)
        answers, self.figures = self.receive()
        return list(answers)

    def prefill(self, *prompts: list[int]) -> list[Ticket]:
        """Compute the prompts' KV cache for another engine."""
        answers = self.ask(*((prompt, 1, FOR_ANOTHER_ENGINE) for prompt in prompts))
        return [answer.ticket or {} for answer in answers]

    def decode(self, prompts: list[list[int]], tickets: Sequence[Ticket | None]) -> list[Answer]:
        """Generate, each prompt from the cache that its ticket names."""
        pairs = zip(prompts, tickets, strict=True)
        return self.ask(*((prompt, TOKENS_TO_GENERATE, ticket) for prompt, ticket in pairs))

    def receive(self) -> Any:
        while self.process.is_alive():
            if self.pipe.poll(0.2):
                return self.pipe.recv()
        end = self.log.read_text(errors="replace")[-3000:]
        raise SystemExit(f"the {self.name} engine ended:\n{end}")


def end(engines: Sequence[Engine], seconds: float) -> None:
    """End engines, kindly for that long."""
    for engine in engines:
        with suppress(OSError):
            engine.pipe.send(None)
    until = time.monotonic() + seconds
    for engine in engines:
        engine.process.join(max(until - time.monotonic(), 0.0))
        engine.process.kill()
        engine.process.join()


def fork_server() -> Any:
    """Importing vLLM takes longer than starting an engine, so it is done once for all of them.

    Ctrl-C is the router's business only, which then ends the engines: the fork server, and with it
    the engines, start with the signal blocked.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm"])
    resource_tracker.ensure_running()  # it unblocks the signal when it starts
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return context


def start(name: str, model: Path, transfer: dict[str, Any] | None) -> Engine:
    """Start an engine; it serves when it is ``ready``."""
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
    """Show which engines are still starting."""
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
    """Prompts through both engines, all at once."""
    before = decode.figures
    answers = decode.decode(prompts, prefill.prefill(*prompts))
    return Row(
        what=what,
        prompt_tokens=sum(map(len, prompts)),
        figures=decode.figures - before,
        same=[answer.tokens for answer in answers] == texts,
    )


def show(rows: Sequence[Row]) -> None:
    """The table."""
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
            f"{row.figures.pulled_tokens:,.0f}",
            f"{row.figures.nbytes:,.0f}",
            f"{row.figures.seconds * 1e3:,.1f}",
            "[green]yes" if row.same else "[red]NO",
        )
    console.print(table)


def check(what: str, holds: bool) -> bool:
    """Print a finding."""
    console.print(f"{'[green]yes' if holds else '[red]NO '}[/] {what}")
    return holds


def start_all(folder: Path) -> dict[str, Engine]:
    """An ordinary engine, and those that hand caches over, all on one tiny Llama."""
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
    """Every prompt alone, then all of them at once."""
    prompts = [tiny_llama.prompt(length) for length in LENGTHS]
    answers = ordinary.decode(prompts, [None] * len(prompts))
    texts = [answer.tokens for answer in answers]
    rows = [
        hand_over(prefill, decode, [prompt], [text], "alone")
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    return [*rows, hand_over(prefill, decode, prompts, texts, f"all {len(prompts)} at once")]


def check_rows(rows: Sequence[Row]) -> bool:
    """What the table shows, in words."""
    return all(
        [
            check("every text is that of one ordinary engine", all(row.same for row in rows)),
            check(
                "every prompt token came through the transfer",
                all(row.figures.pulled_tokens == row.prompt_tokens for row in rows),
            ),
        ]
    )


def check_swaps(ordinary: Engine, prefill: Engine, decode: Engine, credulous: Engine) -> bool:
    """What happens to a prompt that comes with another prompt's ticket."""
    # They differ everywhere but in their last token, which decode always computes itself.
    mine, other = tiny_llama.prompt(128, seed=1), tiny_llama.prompt(128, seed=2)
    mine[-1] = other[-1]
    [text_of_mine, text_of_other] = ordinary.decode([mine, other], [None, None])
    [refused] = decode.decode([mine], prefill.prefill(other))
    [believed] = credulous.decode([mine], prefill.prefill(other))
    after = hand_over(prefill, decode, [mine], [text_of_mine.tokens], "alone")
    return all(
        [
            check(
                "a ticket of another prompt is refused, and the engine serves on",
                refused.finish_reason == "error" and after.same,
            ),
            check(
                "control: with verify_prompt off, prompt X decoded with Y's cache gives Y's text: "
                "it is the cache that decides",
                believed.tokens == text_of_other.tokens != text_of_mine.tokens,
            ),
        ]
    )


def run(folder: Path) -> bool:
    """The demo; whether everything held."""
    engines = start_all(folder)
    seconds = 0.0
    try:
        ordinary, prefill, decode, credulous = engines.values()
        rows = hand_over_all(ordinary, prefill, decode)
        show(rows)
        held = [check_rows(rows), check_swaps(ordinary, prefill, decode, credulous)]
        seconds = 15.0
        return all(held)
    finally:
        end(list(engines.values()), seconds)


def main() -> int:
    """Run the demo in a folder that is gone afterwards."""
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
