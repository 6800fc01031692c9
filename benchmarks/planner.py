"""What planning and computing copies cost, next to what writing the result costs anyway.

    python benchmarks/planner.py [--layers 80] [--blocks 20000] [--pages 256] [--rounds 50]
                                 [--json FILE]

First the plan of one rank between engines of several shapes: milliseconds, the memory it keeps,
and the same with ten times the blocks, which must not change it. Then the copies of one request:
pages scattered and in a row, next to the time that numpy takes to write three arrays of as many
numbers that it already has. Times are CPU time, the best of all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from kvferry.core.descriptors import Pages, ReadRequest, Workspace, copies
from kvferry.core.layout import Axis, Field, Group, GroupKind, Layout, axis
from kvferry.core.memory import I64Array, Region
from kvferry.core.topology import Plan, plan

HEADS, DIM, BLOCK, ELEMENT = 8, 128, 16, 2
"""KV heads of the model, a head's elements, tokens of a block unless said, bytes of an element."""

EQUAL_TARGET_MS, OTHER_TARGET_MS, COPIES_TARGET_MS = 5.0, 250.0, 0.4
"""A twentieth of what vLLM 0.32's worker takes for the same tables; its time for the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How an engine holds the model: ranks, order of axes, tokens of a block; each layer in a
    region of its own, or all together in every page of one."""

    tp: int = 1
    order: str = "HND"
    block: int = BLOCK
    together: bool = False

    def __str__(self) -> str:
        return f"TP{self.tp} {self.order} {self.block}{' together' if self.together else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One line of the first table."""

    local: str
    remote: str
    ms: float
    strips: int
    kept_kb: float
    kept_kb_ten_times_the_blocks: float
    target_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """One line of the second table; the ratio is to writing three arrays of that length."""

    local: str
    remote: str
    pages: str
    copies: int
    ms: float
    limit_ms: float
    ratio: float


def main() -> None:
    options = _options()
    planned = list(_plans(options))
    computed = list(_requests(options))
    _show(planned, computed, options)
    if options.json:
        record = {
            "conditions": _conditions(options),
            "plans": [asdict(one) for one in planned],
            "copies": [asdict(one) for one in computed],
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--blocks", type=int, default=20_000, help="blocks of each engine")
    parser.add_argument("--pages", type=int, default=256, help="pages of a request")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    return parser.parse_args()


def _engine(shape: Shape, layers: int, blocks: int) -> list[Layout]:
    bounds = [rank * HEADS // shape.tp for rank in range(shape.tp + 1)]
    return [
        _rank(shape, layers, blocks, (bounds[rank], bounds[rank + 1]), (rank + 1) << 50)
        for rank in range(shape.tp)
    ]


def _rank(shape: Shape, layers: int, blocks: int, shard: tuple[int, int], base: int) -> Layout:
    count, unit = shard[1] - shard[0], DIM * ELEMENT
    half = count * shape.block * unit
    tokens, heads = _axes(shape, count, unit)
    stride = 2 * half * (layers if shape.together else 1)
    fields = [
        Field(
            key=f"model.layers.{layer}.self_attn.attn/{name}",
            group=0,
            region=0 if shape.together else layer,
            offset=part * half + (2 * half * layer if shape.together else 0),
            page_stride=stride,
            pages=blocks,
            dtype="bfloat16",
            unit=unit,
            tokens=tokens,
            shard=heads,
            shard_range=shard,
        )
        for layer in range(layers)
        for part, name in enumerate("kv")
    ]
    regions = [
        Region(address=base + i * stride * blocks, nbytes=stride * blocks)
        for i in range(1 if shape.together else layers)
    ]
    group = Group(kind=GroupKind.PAGED, block_tokens=shape.block)
    return Layout(regions=tuple(regions), groups=(group,), fields=tuple(fields))


def _axes(shape: Shape, count: int, unit: int) -> tuple[Axis, Axis]:
    if shape.order == "HND":
        return axis((shape.block, unit)), axis((count, shape.block * unit))
    return axis((shape.block, count * unit)), axis((count, unit))


PLANS = [
    (Shape(), Shape()),
    (Shape(together=True), Shape(together=True)),
    (Shape(tp=8), Shape(tp=8)),
    (Shape(), Shape(tp=2)),
    (Shape(), Shape(tp=8)),
    (Shape(tp=8), Shape()),
    (Shape(tp=2), Shape(tp=3)),
    (Shape(order="NHD", block=32), Shape(tp=4)),
]


def _plans(options: argparse.Namespace) -> Iterator[Planned]:
    for near, far in PLANS:
        local, remote = (_engine(s, options.layers, options.blocks) for s in (near, far))
        larger = [_engine(s, options.layers, 10 * options.blocks) for s in (near, far)]
        found = plan(local, remote, 0)
        yield Planned(
            local=str(near),
            remote=str(far),
            ms=round(_best(options.rounds // 5, lambda a, b: plan(a, b, 0), local, remote), 2),
            strips=_strips(found),
            kept_kb=_kept(local, remote),
            kept_kb_ten_times_the_blocks=_kept(*larger),
            target_ms=EQUAL_TARGET_MS if near == far else OTHER_TARGET_MS,
        )


def _strips(found: Plan) -> int:
    matches = [match for source in found.sources for match in source.matches]
    return sum(len(batch.local) for match in matches for batch in match.batches)


def _kept(local: Sequence[Layout], remote: Sequence[Layout]) -> float:
    """Kilobytes that a plan holds, besides the layouts."""
    tracemalloc.start()
    found = plan(local, remote, 0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del found
    return round(held / 1e3, 1)


REQUESTS = [
    (Shape(), Shape()),
    (Shape(together=True), Shape(together=True)),
    (Shape(), Shape(tp=2)),
    (Shape(order="NHD"), Shape(order="NHD", block=32)),
]


def _requests(options: argparse.Namespace) -> Iterator[Computed]:
    for near, far in REQUESTS:
        local, remote = (_engine(s, options.layers, options.blocks) for s in (near, far))
        found = plan(local, remote, 0)
        for scattered in (True, False):
            asked = _request(options, near, far, scattered=scattered)
            workspace = Workspace()
            count = len(copies(found.sources[0], asked, workspace))
            spent = _best(options.rounds, copies, found, found.sources[0], asked, workspace)
            limit = _best(options.rounds, _write, *_arrays(count))
            yield Computed(
                local=str(near),
                remote=str(far),
                pages="scattered" if scattered else "in a row",
                copies=count,
                ms=round(spent, 3),
                limit_ms=round(limit, 3),
                ratio=round(spent / limit, 1),
            )


def _request(
    options: argparse.Namespace, near: Shape, far: Shape, *, scattered: bool
) -> ReadRequest:
    tokens = options.pages * near.block
    rng = np.random.default_rng(0)
    lists = []
    for shape in (near, far):
        needed = -(-tokens // shape.block)
        ids = rng.permutation(options.blocks - 1)[:needed] if scattered else np.arange(needed)
        lists.append(Pages(ids=ids + 1))
    return ReadRequest(ranges=((0, tokens),), local=(lists[0],), remote=(lists[1],))


def _arrays(count: int) -> tuple[I64Array, I64Array]:
    return np.zeros((3, count), dtype=np.int64), np.ones((3, count), dtype=np.int64)


def _write(target: I64Array, source: I64Array) -> None:
    for row, values in zip(target, source, strict=True):
        row[:] = values


def _best(rounds: int, call: Callable[..., object], *arguments: object) -> float:
    """Milliseconds of CPU time."""
    best = float("inf")
    for _ in range(max(rounds, 1)):
        start = time.process_time_ns()
        call(*arguments)
        best = min(best, (time.process_time_ns() - start) / 1e6)
    return best


def _conditions(options: argparse.Namespace) -> dict[str, object]:
    return {
        "layers": options.layers,
        "blocks": options.blocks,
        "pages of a request": options.pages,
        "rounds": options.rounds,
        "cores": os.cpu_count(),
        "load before": round(os.getloadavg()[0], 1),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _show(planned: list[Planned], computed: list[Computed], options: argparse.Namespace) -> None:
    console = Console()
    console.print(_plan_table(planned))
    console.print(_copies_table(computed))
    for name, value in _conditions(options).items():
        console.print(f"{name}: {value}")


def _plan_table(planned: list[Planned]) -> Table:
    table = Table(title="plan of one rank", caption="kept: memory, and with ten times the blocks")
    for heading in ("local", "remote", "ms", "strips", "kept KB", "10x", "goal"):
        table.add_column(heading, justify="left" if heading in ("local", "remote") else "right")
    for one in planned:
        table.add_row(
            one.local,
            one.remote,
            f"{one.ms:.2f}",
            f"{one.strips}",
            f"{one.kept_kb:.0f}",
            f"{one.kept_kb_ten_times_the_blocks:.0f}",
            f"≤ {one.target_ms:.0f} {'met' if one.ms <= one.target_ms else 'MISSED'}",
        )
    return table


def _copies_table(computed: list[Computed]) -> Table:
    table = Table(
        title="copies of one request, from one rank", caption="ratio: to writing three such arrays"
    )
    for heading in ("local", "remote", "pages", "copies", "ms", "limit ms", "ratio", "goal"):
        left = heading in ("local", "remote", "pages")
        table.add_column(heading, justify="left" if left else "right")
    for one in computed:
        met = "met" if one.ms <= COPIES_TARGET_MS else "MISSED"
        table.add_row(
            one.local,
            one.remote,
            one.pages,
            f"{one.copies}",
            f"{one.ms:.3f}",
            f"{one.limit_ms:.3f}",
            f"{one.ratio:.1f}",
            f"≤ {COPIES_TARGET_MS} {met}",
        )
    return table


if __name__ == "__main__":
    main()
