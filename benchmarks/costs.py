"""What single things cost, most of them beside the same without them.

    python -m benchmarks.costs [NAME]... [--quick] [--json FILE]

Each cost is an entry of ``COSTS``; by default, all are measured, one after the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks import engines, harness
from benchmarks.connector_steps import request_profile, steps, ticket_format
from benchmarks.engines import Shape
from benchmarks.harness import Row, WorkerProcess, row
from benchmarks.hostile_replies import replies
from benchmarks.side_channel import measure as side_channel
from kvferry.core.endpoint import EndpointOptions
from kvferry.core.lifecycle.ticket import Ticket, check_against, page_limits
from kvferry.core.messages import decode_payload
from kvferry.core.metrics import LoadRecord
from kvferry.core.security import TicketKey, TicketSecrets
from kvferry.core.security.ticket_proof import verify
from kvferry.integrations.vllm.ticket_format import read_ticket
from kvferry.testing import CacheShape, ModelFreeEngine

# The fence: one small read for each producer rank and request.

FENCE_BLOCKS = 256
PATIENCE = 60.0


def _fence_engine(name: str, driver: str, ranks: int) -> ModelFreeEngine:
    """An engine of one layer with blocks of 64 KiB; block 0 is nobody's."""
    shape = CacheShape(
        tp=ranks,
        block=16,
        pages=FENCE_BLOCKS + 1,
        layers=1,
        model_heads=2,
        dim=2048,
        dtype="uint8",
    )
    return ModelFreeEngine(name, shape, driver=driver, options=EndpointOptions(lease=600.0))


class FenceProducer:
    """The engine in the other process."""

    def __init__(self, driver: str, ranks: int) -> None:
        self._engine = _fence_engine("prefill", driver, ranks)

    def ticket(self, number: int) -> Ticket:
        """For a request that has all blocks, which the last one has released."""
        if number:
            self._engine.released(f"p-{number - 1}", PATIENCE)
        self._engine.take_on(f"p-{number}")
        pages = list(range(1, FENCE_BLOCKS + 1))
        return self._engine.finish(f"p-{number}", pages, 16 * FENCE_BLOCKS)


def fence(quick: bool) -> Iterator[Row]:
    """The share of the fence in its load of 16 MiB, as the endpoint counts it."""
    for driver in harness.working_drivers():
        for ranks in (1, 2):
            harness.say(f"{driver}, {ranks} ranks")
            make = partial(FenceProducer, driver, ranks)
            with WorkerProcess(make) as producer, _fence_engine("decode", driver, 1) as decode:
                records: list[LoadRecord] = []
                for number in range(5 if quick else 201):
                    ticket = producer.ask("ticket", number)
                    decode.pull(ticket.request, ticket, list(ticket.pages[0]))
                    results = decode.outcome(ticket.request, PATIENCE)
                    if results.failed:
                        raise SystemExit(f"a load failed: {results.failed}")
                    records += results.loads
            fences, loads = np.array([(r.fence_seconds, r.seconds) for r in records[1:]]).T
            yield row(
                "the fence",
                f"{driver}, {ranks} producer rank{'s' * (ranks > 1)}",
                "time of its load",
                fences,
                loads,
                unit=f"µs of {np.median(loads) * 1e3:.3g} ms",
                target="≤ 0.1",
            )


# Proofs of tickets.


def proofs(quick: bool) -> Iterator[Row]:
    """Each step with and without the proof; what is verified is not remembered here."""
    key, secrets, tokens = TicketKey(), TicketSecrets.of(["the secret of both"]), engines.BLOCK
    for count in (1, 256, 8000):
        offer = ticket_format("prefill", 3, 5600, range(1, 2 * count, 2), count * tokens)
        # Both are signed: a ticket that is neither signed nor proved is not read.
        plain, proved = offer.params(secrets), offer.params(secrets, key)
        read = partial(read_ticket, secrets=secrets, prompt=count * tokens)
        ranks = [
            decode_payload(each)
            for each in engines.payloads(engines.engine(Shape(), 1, 2 * count + 1))
        ]
        limits = page_limits(ranks)

        def check(ticket: Ticket, ranks: Any = ranks, limits: Any = limits) -> None:
            verify.cache_clear()
            check_against(ticket, ranks, limits, ticket_key=ticket.ticket_key)

        cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "per prefill": (partial(offer.params, None, key), offer.params),
            "per prefill, with ticket_secrets": (
                partial(offer.params, secrets, key),
                partial(offer.params, secrets),
            ),
            "per load, in the scheduler half, with ticket_secrets": (
                partial(read, proved),
                partial(read, plain),
            ),
            "per load and rank": (partial(check, read(proved)), partial(check, read(plain))),
        }
        for what, ways in cases.items():
            timed = [harness.timed(way, in_a_row=10) for way in ways]
            with_proof, without = harness.by_turns(timed, 4 if quick else 200)[:, :, 0]
            yield row(
                "proofs of tickets",
                f"{what}, {count:,} block{'s' * (count > 1)}",
                "time without a proof",
                with_proof,
                without,
                unit=f"µs more than {np.median(without) * 1e6:.3g}",
                measured=float(np.median(with_proof) - np.median(without)),
            )


COSTS: dict[str, Callable[[bool], Iterable[Row]]] = {
    "request_profile": request_profile,
    "steps": steps,
    "channel": lambda quick: side_channel(1, quick),
    "cold_start": lambda quick: side_channel(8, quick),
    "replies": replies,
    "fence": fence,
    "proofs": proofs,
}


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """The costs that are named."""
    if unknown := {*options.name} - {*COSTS}:
        raise SystemExit(f"no cost is named {', '.join(unknown)}: choose of {', '.join(COSTS)}")
    for name in options.name or COSTS:
        yield from COSTS[name](options.quick)


if __name__ == "__main__":
    harness.main(measure, __doc__, ("name", {"nargs": "*", "help": "default: all"}))
