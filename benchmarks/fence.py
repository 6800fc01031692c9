"""What the fence costs: one small read for each producer rank and request.

    python benchmarks/fence.py [--driver NAME]... [--blocks 256] [--rounds 200] [--quick]
                               [--json FILE]

Two processes of one host, each with an endpoint for each of its ranks. Decode loads a request of
256 blocks of 64 KiB, again and again, from a producer of one rank and from one of two. The share is
that of the fence in the time of its own load, as the endpoint counts it: from when the data is
final until the slot word is there, with "done" on its way. The median of all loads, and the
interval of 95 % of that.
"""

from __future__ import annotations

import argparse
from functools import partial

import common
import drivers
import numpy as np
import rows
import worker_process

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.metrics import LoadRecord
from kvferry.testing import CacheShape, ModelFreeEngine

BLOCK = 64 << 10
TOKENS, HEADS = 16, 2
UNIT = BLOCK // TOKENS // HEADS
"""A token's bytes of one head; heads first, so that a rank's part of a block is in one piece."""
MOST_OF_A_LOAD = 0.1
"""The target."""
RANKS = (1, 2)
OPTIONS = EndpointOptions(lease=600.0)
PATIENCE = 60.0


def engine(name: str, driver: str, blocks: int, ranks: int) -> ModelFreeEngine:
    """An engine with one layer, a byte an element; block 0 is nobody's."""
    shape = CacheShape(
        tp=ranks,
        block=TOKENS,
        pages=blocks + 1,
        layers=1,
        model_heads=HEADS,
        dim=UNIT,
        dtype="uint8",
    )
    return ModelFreeEngine(name, shape, driver=driver, options=OPTIONS)


class Producer:
    """The engine in the other process."""

    def __init__(self, driver: str, blocks: int, ranks: int) -> None:
        self._engine = engine("prefill", driver, blocks, ranks)
        self._pages = list(range(1, blocks + 1))

    def ticket(self, number: int) -> Ticket:
        """For a request that has all blocks, which the last one has released."""
        if number:
            self._engine.released(f"p-{number - 1}", PATIENCE)
        self._engine.take_on(f"p-{number}")
        return self._engine.finish(f"p-{number}", self._pages, len(self._pages) * TOKENS)


def measured(driver: str, blocks: int, ranks: int, rounds: int) -> rows.Row:
    """What the fence of a driver costs a load."""
    with (
        worker_process.WorkerProcess(partial(Producer, driver, blocks, ranks)) as producer,
        engine("decode", driver, blocks, 1) as decode,
    ):
        records = [_load(decode, producer.ask("ticket", number)) for number in range(rounds + 1)]
    return _row(driver, ranks, records[1:])  # the first one shakes hands


def _load(decode: ModelFreeEngine, ticket: Ticket) -> LoadRecord:
    decode.pull(ticket.request, ticket, list(ticket.pages[0]))
    results = decode.outcome(ticket.request, PATIENCE)
    if results.failed:
        raise SystemExit(f"a load failed: {results.failed}")
    return results.loads[0]


def _row(driver: str, ranks: int, records: list[LoadRecord]) -> rows.Row:
    fences = np.array([record.fence_seconds for record in records])
    loads = np.array([record.seconds for record in records])
    share = common.ratio(fences, loads)
    return rows.compared(
        share,
        section="the fence",
        case=f"{driver}, {ranks} producer rank{'s' * (ranks > 1)}",
        measured=float(f"{np.median(fences) * 1e6:.3g}"),
        unit=f"µs of {np.median(loads) * 1e3:.3g} ms",
        of="time of its load",
        target=rows.goal(MOST_OF_A_LOAD, at_least=False),
    )


def main() -> None:
    options = _options()
    names = options.driver or drivers.working()
    with rows.progress(len(names) * len(options.ranks)) as show:
        found = []
        for name in names:
            for ranks in options.ranks:
                show(f"{name}, {ranks} ranks")
                found.append(measured(name, options.blocks, ranks, options.rounds))
    rows.show(found)
    rows.write(options.json, found)
    common.leave()


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--driver", action="append", help="default: each that works here")
    parser.add_argument("--blocks", type=int, default=256, help="of 64 KiB, in a request")
    parser.add_argument("--ranks", type=int, action="append", help="of the producer; default 1, 2")
    parser.add_argument("--rounds", type=int, help="default 200")
    parser.add_argument("--quick", action="store_true", help="to see that it runs: a few seconds")
    found = parser.parse_args()
    found.rounds = found.rounds or (4 if found.quick else 200)
    found.ranks = found.ranks or RANKS
    return found


if __name__ == "__main__":
    main()
