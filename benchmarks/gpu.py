"""VRAM to VRAM between two endpoint processes, beside a plain copy on the device.

    python -m benchmarks.gpu [--driver nixl] [--near cuda:0] [--far cuda:1] [--megabytes 256]
                             [--rounds 20] [--staged] [--tcp] [--path] [--quick] [--json FILE]

It needs a CUDA build of torch, a GPU, and one of the drivers nixl and ucx; without, it says so and
ends with status 3. **It has never run on a GPU.** The pages of a request move between two processes
that each have an ``Endpoint``, as in an engine: every thread enters the device, pages are written
on streams, loads wait for events, and the end of the last page is zeroed. Before each load its
pages are filled with NaNs, and after each load they are compared. The plain copy is torch's, of as
many bytes in one piece, on the device that reads, waited for. ``--path`` lets UCX say which of its
protocols and devices move the bytes (its UCX_PROTO_INFO). ``--near cpu --far cpu`` rehearses.

``--staged`` measures the same loads between two more engines, whose pages cross through pinned host
pages; the two pairs take turns. Where the ratio is above 1, staging is faster. A staged load's time
includes the copy to the other side's host pages, except what of it is done before the ticket is
here. ``--tcp`` leaves UCX nothing but tcp between the processes, as between hosts without RDMA, but
within this host: ``--tcp --staged`` shows whether to stage there, or to let NIXL copy.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from benchmarks import harness
from benchmarks.harness import Row, Way, row
from tests.long.gpu.device import PAGE_TOKENS, CacheShape, Device, load_torch
from tests.long.gpu.engines import Engine, Producer

DRIVERS, OVER_TCP = ("nixl", "ucx"), ("nixl",)
"""Those that reach GPU memory, and those that do so over tcp."""
TCP = "tcp,cuda_copy,self"
"""UCX's transports for ``--tcp``: ``cuda_copy`` and ``self`` stay within a process, and neither
``cuda_ipc`` nor shared memory (``sm``) is among them."""
KIB = 1 << 10
BLOCKS = (8 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB)
LAYERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests of one size: the bytes of each layer of a page, and how the pages lie."""

    block: int
    order: str
    pages: int

    def __str__(self) -> str:
        return f"read of {self.block >> 10} KiB blocks, {self.order}"

    @property
    def shape(self) -> CacheShape:
        """The cache: page 0 stands for none, and the request has half of the others."""
        return CacheShape(pages=2 * self.pages + 1, layers=LAYERS, piece_bytes=self.block)

    @property
    def nbytes(self) -> int:
        """The bytes of a request."""
        return self.pages * LAYERS * self.block

    def chosen(self, rng: random.Random) -> list[int]:
        """The pages of a request, on one side."""
        if self.order == "in a row":
            return list(range(1, self.pages + 1))
        return rng.sample(range(1, 2 * self.pages + 1), self.pages)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Each driver and case."""
    _check_machine(options)
    if options.path:
        os.environ["UCX_PROTO_INFO"] = "y"  # UCX looks when a transport is made
    if options.tcp:
        os.environ["UCX_TLS"] = TCP  # likewise, in both processes
    usual = OVER_TCP if options.tcp else DRIVERS
    able = options.driver or [name for name in harness.working_drivers() if name in usual]
    if not able:
        harness.nothing(f"{' and '.join(usual)} do not work here")
    nbytes = (options.megabytes or (4 if options.quick else 256)) << 20
    rounds = options.rounds or (2 if options.quick else 20)
    near = Device(options.near)
    far = options.far or f"cuda:{near.torch.cuda.device_count() - 1}"
    where = f"{options.near} from {far}{', tcp' * options.tcp}"
    harness.say(f"{near.describe()}, torch {near.torch.__version__}")
    with ExitStack() as stack:
        producers = [stack.enter_context(Producer(far)) for _ in range(1 + options.staged)]
        blocks = BLOCKS[: 2 if options.quick else 4]
        for driver, block, order in itertools.product(able, blocks, ("scattered", "in a row")):
            case = Case(block=block, order=order, pages=max(2, nbytes // LAYERS // block))
            harness.say(f"{driver}, {case}")
            times = _times(driver, near, producers, case, rounds)
            yield from _rows(f"{driver}, {where}", case, times)


def _check_machine(options: argparse.Namespace) -> None:
    if find_spec("torch") is None:
        harness.nothing("torch is not installed here: it makes the memory; no GPU was looked for")
    torch = load_torch()
    if options.near != "cpu" and not torch.cuda.is_available():
        harness.nothing(f"torch {torch.__version__} sees no GPU here: nothing was measured")


def _times(
    driver: str, near: Device, producers: Sequence[Producer], case: Case, rounds: int
) -> harness.Times:
    """Return the seconds of plain copies, of loads and, with a second producer, of staged loads."""
    with ExitStack() as stack:
        source, target = near.zeros(case.nbytes), near.zeros(case.nbytes)

        def copy() -> None:
            target.copy_(source)
            near.wait()

        ways: list[Way] = [lambda: harness.timed(copy)()[:1]]
        for staged, producer in enumerate(producers):
            producer.open(driver, case.shape, staged=bool(staged))
            engine = Engine(driver, near, case.shape, f"near-{staged}", staged=bool(staged))
            ways.append(partial(next, _loads(stack.enter_context(engine), producer, case)))
        return harness.by_turns(ways, rounds)[:, :, 0]


def _loads(engine: Engine, producer: Producer, case: Case) -> Iterator[list[float]]:
    """Load request after request, and yield the seconds of each."""
    rng = random.Random(0)
    for number in itertools.count():
        source, target = case.chosen(rng), case.chosen(rng)
        tokens = case.pages * PAGE_TOKENS - 1  # so that there is something to zero
        record, wrong = engine.load_checked(producer, source, target, number, tokens)
        if wrong:
            raise SystemExit(f"{case}: {wrong} words are wrong after the load")
        yield [record.seconds]


def _rows(section: str, case: Case, times: harness.Times) -> Iterator[Row]:
    """Yield a row of the loads and, if there are any, one of the staged loads."""
    copies, direct, *staged = times
    say = partial(row, case=str(case), unit="GB/s", scale=case.nbytes / 1e9)
    of = "speed of a plain device copy"
    yield say(section, of=of, ours=1 / direct, theirs=1 / copies)
    for each in staged:
        of = "speed without staging"
        yield say(f"{section}, staged", of=of, ours=1 / each, theirs=1 / direct)


if __name__ == "__main__":
    harness.main(
        measure,
        __doc__,
        ("--driver", {"action": "append", "help": "default: nixl and ucx, if they work"}),
        ("--near", {"default": "cuda:0", "help": "the device that reads; or cpu"}),
        ("--far", {"help": "the other process's; default: the last one"}),
        ("--megabytes", {"type": int, "help": "of each request; default 256"}),
        ("--rounds", {"type": int, "help": "default 20"}),
        ("--staged", {"action": "store_true", "help": "also by way of host pages, by turns"}),
        (
            "--tcp",
            {
                "action": "store_true",
                "help": "nothing but tcp between the processes (UCX_TLS); by default without ucx, "
                "which reads no GPU memory over tcp",
            },
        ),
        ("--path", {"action": "store_true", "help": "let UCX say how the bytes go"}),
    )
