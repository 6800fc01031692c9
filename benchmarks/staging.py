"""Staging through host memory, beside the direct way, on CPU memory.

    python benchmarks/staging.py [--rounds 10] [--at-once 1 8] [--quick] [--json FILE]

Two things are measured. How fast pages are copied between a cache and its host pages, each way,
beside a plain copy of as many contiguous bytes: blocks and host pages are in random order, 64 MiB
at a time, and the time is that until the endpoint would know. And the time to decode's first token
of two real vLLM engines that both stage, beside two that do not, as ``end_to_end.py`` has it; the
two pairs take turns. On the CPU, staging is work without a gain: the first token shows its cost.

It needs vLLM's CPU build.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import common
import end_to_end
import numpy as np
import rows
import serving

from kvferry.core.layout.host_page_format import HostPageFormat
from kvferry.core.layout.paged_layout import paged_layout

POLL_SECONDS = 0.0002
"""Pause between two questions, as the endpoint's."""
MOVED = 64 << 20
"""How many bytes are copied at a time."""
LAYERS = 32
ROWS = {"16 KiB": 16 << 10, "256 KiB": 256 << 10}
"""The bytes of a block in each layer."""

FIRST_TOKENS = "time to decode's first token, staged on both sides"
COPIES = "copies between a cache and host pages"


def copies(rounds: int, show: rows.Show) -> Iterator[rows.Row]:
    """How fast pages are copied, each way."""
    for name, row in ROWS.items():
        show(f"copies of {name}")
        out, into, plain = _ways(row)
        found = common.by_turns(rounds, [common.timed(way) for way in (out, into, plain)])
        for index, way in enumerate(("to host pages", "from host pages")):
            times = found[[index, 2], :, 0]
            yield rows.compared(
                common.ratio(times[1], times[0]),
                section=COPIES,
                case=f"{way}, {LAYERS} layers with {name} of each block",
                measured=float(f"{MOVED / np.median(times[0]) / 1e9:.3g}"),
                unit="GB/s",
                of="speed of a plain copy",
            )


def _ways(row: int) -> tuple[Callable[[], object], ...]:
    """Copy to host pages, from host pages, and from one contiguous memory to another."""
    import torch

    from kvferry.integrations.vllm.host_pool import HostPool

    count = MOVED // (LAYERS * row)
    blocks = 4 * count
    tokens, elements = 16, row // 16
    caches = {
        str(layer): torch.zeros((blocks, tokens, elements), dtype=torch.uint8)
        for layer in range(LAYERS)
    }
    form = HostPageFormat.of(paged_layout(caches, ("page", "token", "element")))
    pool = HostPool(caches.values(), form, 2 * count, device=torch.device("cpu"))
    rng = np.random.default_rng(0)
    here = rng.permutation(2 * count)[:count].tolist()
    there = rng.permutation(blocks)[:count].tolist()
    source, target = np.zeros((2, MOVED), dtype=np.uint8)
    return (
        lambda: _await(pool.out(there, here)),
        lambda: _await(pool.into(here, there)),
        lambda: np.copyto(target, source),
    )


def _await(passed: Callable[[], bool]) -> None:
    while not passed():
        time.sleep(POLL_SECONDS)


def first_tokens(options: argparse.Namespace, show: rows.Show, stack: ExitStack) -> list[rows.Row]:
    """A pair that stages beside one that does not, by turns."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-"))
    serving.prepare(folder)
    fleet = end_to_end.Fleet(Path(folder), max(options.at_once), stack)
    show("starting four engines")
    pairs = (
        fleet.launch("loopback", name="staged", staging=True, staging_timeout=600.0),
        fleet.launch("loopback"),
    )
    made = []
    for number in options.at_once:
        show(f"first tokens, {number} at once")
        given = end_to_end.prompts(max(number, 2))
        found = np.empty((2, options.rounds, 2))
        for pair in pairs:
            pair.first_tokens(given, number)  # what is done once is done
        for index in range(options.rounds):
            for turn in range(2):
                which = (index + turn) % 2
                found[which, index] = pairs[which].first_tokens(given, number)
        times = found[:, :, 0]
        made.append(
            rows.compared(
                common.ratio(*times),
                section=FIRST_TOKENS,
                case=f"loopback, {number} at once",
                measured=float(f"{np.median(times[0]) * 1e3:.3g}"),
                unit="ms",
                of="time without staging",
            )
        )
    return made


def main() -> None:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, help="default 10")
    parser.add_argument("--at-once", type=int, nargs="+", help="requests; default 1 8")
    parser.add_argument("--quick", action="store_true", help="to see that it runs: half a minute")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 10)
    options.at_once = options.at_once or ([2] if options.quick else [1, 8])
    if find_spec("vllm") is None:
        rows.nothing("vLLM is not installed here")
    steps = len(ROWS) + 1 + len(options.at_once)
    with ExitStack() as stack, rows.progress(steps) as show:
        found = list(copies(3 * options.rounds, show))
        found += first_tokens(options, show, stack)
    rows.show(found)
    rows.write(options.json, found)


if __name__ == "__main__":
    main()
