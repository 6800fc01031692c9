"""How long prefill stands still when decode dies with most of prefill's cache held for it.

    python benchmarks/orphaned.py [--requests 40] [--quick] [--json FILE]

Two vLLM engines on the CPU, with kvferry's defaults. Decode has more requests than it can run, so
that prefill's cache is full of pages that decode waits for, and requests wait at prefill. Then
decode is killed (SIGKILL), and the time from one prefilled request to the next is measured, beside
the five seconds that it may take at most. It needs vLLM's CPU build.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections import deque
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common
import numpy as np
import rows

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # for what the tests know of starting engines
from examples.tiny_llama import prompt  # noqa: E402
from tests.engines import engines, probes  # noqa: E402
from tests.engines.engines import (  # noqa: E402
    CONNECTOR,
    PREFILL,
    Engine,
)
from tests.engines.fixtures import _build  # noqa: E402

BLOCKS = 257
"""Of 32 tokens each, and one that is never given out."""
TOKENS = 250
"""Of a prompt: eight blocks."""
WAITING = 4
"""So many requests wait at prefill at any time."""
MOST_SECONDS = 5.0
"""For which prefill may stand still."""
OTHERS = 200
"""Requests of decode's own, of which it runs one at a time: it gets to nothing else."""


def main() -> None:
    options = _options()
    if find_spec("vllm") is None:
        rows.nothing("vLLM is not installed here")
    with tempfile.TemporaryDirectory() as folder, rows.progress(3) as show:
        scratch = Path(folder)
        engines.prepare({"VLLM_CACHE_ROOT": folder, "TMPDIR": folder})
        model = scratch / "model"
        model.mkdir()
        show("making a model")
        builder = multiprocessing.get_context("forkserver").Process(target=_build, args=(model,))
        builder.start()
        builder.join()
        show("starting two engines")
        prefill = _engine("prefill", "kv_producer", model, scratch, num_gpu_blocks_override=BLOCKS)
        decode = _engine("decode", "kv_consumer", model, scratch, max_num_seqs=1)
        try:
            pair = prefill.wait_started(), decode.wait_started()
            show("killing one")
            held, gaps = _measure(*pair, options.requests)
        finally:
            prefill.close()
            decode.close()
    found = [
        _row("after the kill, until prefill goes on", held, gaps[0]),
        _row("after that, longest pause between two requests", held, max(gaps[1:])),
    ]
    rows.show(found)
    rows.write(options.json, found)


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--requests", type=int, help="prefilled after the kill; default 40")
    parser.add_argument("--quick", action="store_true", help="to see that it runs: a minute")
    options = parser.parse_args()
    options.requests = options.requests or (8 if options.quick else 40)
    return options


def _row(what: str, held: float, seconds: float) -> rows.Row:
    once = np.array([seconds])
    return rows.compared(
        common.ratio(once, np.array([MOST_SECONDS])),
        section=f"decode is killed, with {100 * held:.0f} % of prefill's cache held for it",
        case=what,
        measured=float(f"{seconds:.3g}"),
        unit="s",
        of=f"{MOST_SECONDS:g} s",
        target=rows.goal(1.0, at_least=False),
    )


def _measure(prefill: Engine, decode: Engine, count: int) -> tuple[float, list[float]]:
    """The part of the cache that was held, and seconds from the kill, and between requests."""
    seeds = iter(range(1_000_000))

    def submit() -> str:
        [request] = prefill.submit(prompt(TOKENS, seed=next(seeds)), max_tokens=1, params=PREFILL)
        return request

    decode.submit(*[prompt(10)] * OTHERS, max_tokens=1000)
    total = prefill.run(probes.free_blocks)
    fitting = total // (TOKENS // 32 + 1)
    for _ in range(fitting):
        prompted = prompt(TOKENS, seed=next(seeds))
        [ticket] = prefill.prefill(prompted)
        decode.submit(prompted, params=ticket)
    waiting = deque(submit() for _ in range(WAITING))
    time.sleep(5.0)  # everything is claimed, and an honest backlog is left alone
    if prefill.finished:
        raise SystemExit(f"prefill went on before the kill: {prefill.finished}")
    held = 1 - prefill.run(probes.free_blocks) / total
    decode.kill()
    gaps: list[float] = []
    last = time.perf_counter()
    for _ in range(count):
        prefill.results([waiting.popleft()])
        waiting.append(submit())
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    return held, gaps


def _engine(name: str, role: str, model: Path, folder: Path, **options: Any) -> Engine:
    transfer = CONNECTOR | {"kv_role": role, "kv_connector_extra_config": {}}
    return Engine(name, model, folder, kv_transfer_config=transfer, **options)


if __name__ == "__main__":
    main()
