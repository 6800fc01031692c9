"""VRAM to VRAM between two processes, beside a plain copy on the device and NIXL's own calls.

    python benchmarks/gpu.py [--driver nixl] [--near cuda:0] [--far cuda:1] [--megabytes 512]
                             [--rounds 30] [--path] [--quick] [--json FILE]

It needs a CUDA build of torch, a GPU, and one of the drivers nixl and ucx; without, it says so and
ends with status 3. **It has never run on a GPU.** The plain copy
is torch's, of all bytes in one piece, on the device that reads, waited for. ``--path`` lets UCX say
on stderr which of its protocols and devices move the bytes (its UCX_PROTO_INFO).
"""

from __future__ import annotations

import argparse
import importlib
import os
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import common
import drivers
import rows

from kvferry.testing.memory import Buffer, allocate, pattern

ABLE = ("nixl", "ucx")


def main() -> None:
    options = _options()
    torch = _torch()
    if options.path:
        os.environ["UCX_PROTO_INFO"] = "y"  # UCX looks when a transport is made
    able = [name for name in options.driver or drivers.working() if name in ABLE]
    if not able:
        rows.nothing("neither nixl nor ucx works here")
    cases = [
        drivers.Case(where="there", op="read", block=block, order=order)
        for block in (drivers.QUICK_BLOCKS if options.quick else drivers.BLOCKS)
        for order in drivers.ORDERS
    ]
    far = options.far or f"cuda:{torch.cuda.device_count() - 1}"
    with ExitStack() as stack, rows.progress(len(cases)) as show:
        memory = _memory(torch, options.near, far, options.megabytes << 20)
        lab = drivers.Lab(able, memory, stack, within=False)
        found = drivers.speeds(lab, cases, options.rounds, show)
    found = [rows.renamed(row, f"{row.section}, {options.near} from {far}") for row in found]
    found.sort(key=lambda row: row.section)
    rows.show(found)
    print(f"{torch.cuda.get_device_name(options.near)}, torch {torch.__version__}")
    rows.write(options.json, found)
    common.leave()


def _torch() -> Any:
    if find_spec("torch") is None:
        rows.nothing("torch is not installed here: it makes the memory; no GPU was looked for")
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        rows.nothing(f"torch {torch.__version__} sees no GPU here: nothing was measured")
    return torch


def _memory(torch: Any, near: str, far: str, nbytes: int) -> drivers.Memory:
    buffers: list[Buffer] = [allocate(near, nbytes) for _ in range(2)]
    buffers[1].put(pattern(nbytes, 2))
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=near) for _ in range(2))

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(near)

    return drivers.Memory(
        near=buffers[0], second=buffers[1], other=far, copy=copy, name="a plain device copy"
    )


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--driver", action="append", choices=ABLE, help="default: those that work")
    parser.add_argument("--near", default="cuda:0", help="the device that reads")
    parser.add_argument("--far", help="the other process's; default: the last one")
    parser.add_argument("--megabytes", type=int, help="of each buffer; default 512")
    parser.add_argument("--rounds", type=int, help="default 30")
    parser.add_argument("--path", action="store_true", help="let UCX say how the bytes go")
    parser.add_argument("--quick", action="store_true", help="to see that it runs")
    found = parser.parse_args()
    found.megabytes = found.megabytes or (16 if found.quick else 512)
    found.rounds = found.rounds or (2 if found.quick else 30)
    return found


if __name__ == "__main__":
    main()
