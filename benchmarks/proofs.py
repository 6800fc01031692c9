"""What proofs of tickets cost: one per prefill, and a check for each load and rank.

    python benchmarks/proofs.py [--blocks 1]... [--rounds 200] [--quick] [--json FILE]

Each step is run with and without the proof, by turns, on tickets of 1, 256 and 8,000 blocks:

- the scheduler half of prefill makes the ticket, once per prefill; with ``ticket_secrets`` too;
- the scheduler half of decode reads it, once per load;
- every rank of decode compares it with the handshake, once per load: only here a signature is
  verified. The check is made when the request comes and again when its load begins, and what was
  verified is remembered, so the second is free; here nothing is remembered.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import common
import rows

from kvferry.core.layout import Field, Group, GroupKind, Layout, axis
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.ticket import Ticket, check_against, page_limits
from kvferry.core.memory import Region
from kvferry.core.messages import Coordinates, RankPayload
from kvferry.core.security import TicketKey, TicketSecrets
from kvferry.core.security.proof import verify
from kvferry.integrations.vllm.ticket_params import ParallelSizes, TicketParams, read_ticket

BLOCKS = (1, 256, 8000)
TOKENS = 16
"""Of a block."""
IN_A_ROW = 10
KEY = TicketKey()
SECRETS = TicketSecrets.of(["the secret of both engines"])


def offer(blocks: int) -> TicketParams:
    """A producer's offer of so many blocks, which lie apart."""
    return TicketParams(
        engine="prefill",
        incarnation=7,
        request="cmpl-0123456789abcdef",
        host="10.0.0.1",
        port=5600,
        hold=Hold(slot=3, generation=9),
        pages=[list(range(1, 2 * blocks, 2))],
        first_index=[0],
        tokens=blocks * TOKENS,
        digest=bytes(16),
        computed=True,
        sizes=ParallelSizes(),
    )


def payload(blocks: int) -> RankPayload:
    """What the producer's rank publishes, of one layer."""
    field = Field(
        key="layer0",
        group=0,
        region=0,
        offset=0,
        page_stride=64 * TOKENS,
        pages=2 * blocks + 1,
        dtype="uint8",
        unit=64,
        tokens=axis((TOKENS, 64)),
    )
    region = Region(address=1 << 20, nbytes=(2 * blocks + 1) * 64 * TOKENS)
    return RankPayload(
        oldest=1,
        newest=1,
        engine="prefill",
        incarnation=7,
        rank=0,
        coordinates=Coordinates(),
        agreement={},
        layout=Layout(
            regions=(region,),
            groups=(Group(kind=GroupKind.PAGED, block_tokens=TOKENS),),
            fields=(field,),
        ),
        driver="loopback",
        address=b"",
        slots=Region(address=1 << 40, nbytes=64),
    )


def timed(work: Callable[[], object]) -> common.Way:
    """A way that takes what one call takes, by the mean of some in a row."""

    def way() -> Sequence[float]:
        begun = time.perf_counter()
        for _ in range(IN_A_ROW):
            work()
        return [(time.perf_counter() - begun) / IN_A_ROW]

    return way


def measured(blocks: int, rounds: int) -> list[rows.Row]:
    """What each step costs more on tickets of so many blocks."""
    made, prompt = offer(blocks), blocks * TOKENS
    # Both are signed: a ticket that is neither signed nor proved is not read.
    plain, proved = made.params(SECRETS), made.params(SECRETS, KEY)
    tickets = (
        read_ticket(plain, SECRETS, prompt=prompt),
        read_ticket(proved, SECRETS, prompt=prompt),
    )
    ranks = [payload(blocks)]
    limits = page_limits(ranks)

    def check(ticket: Ticket) -> None:
        verify.cache_clear()
        check_against(ticket, ranks, limits, ticket_key=ticket.ticket_key)

    steps: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "per prefill": (lambda: made.params(None, KEY), made.params),
        "per prefill, with ticket_secrets": (
            lambda: made.params(SECRETS, KEY),
            lambda: made.params(SECRETS),
        ),
        "per load, in the scheduler half, with ticket_secrets": (
            lambda: read_ticket(proved, SECRETS, prompt=prompt),
            lambda: read_ticket(plain, SECRETS, prompt=prompt),
        ),
        "per load and rank": (lambda: check(tickets[1]), lambda: check(tickets[0])),
    }
    return [_row(step, blocks, *ways, rounds) for step, ways in steps.items()]


def _row(
    step: str, blocks: int, ours: Callable[[], object], theirs: Callable[[], object], rounds: int
) -> rows.Row:
    found = common.by_turns(rounds, [timed(ours), timed(theirs)])[:, :, 0]
    with_proof, without = (sorted(each)[rounds // 2] for each in found)
    return rows.compared(
        common.ratio(found[0], found[1]),
        section="proofs of tickets",
        case=f"{step}, {blocks:,} block{'s' * (blocks > 1)}",
        measured=float(f"{(with_proof - without) * 1e6:.3g}"),
        unit=f"µs more than {without * 1e6:.3g}",
        of="time without a proof",
    )


def main() -> None:
    options = _options()
    with rows.progress(len(options.blocks)) as show:
        found: list[rows.Row] = []
        for blocks in options.blocks:
            show(f"{blocks} blocks")
            found += measured(blocks, options.rounds)
    found.sort(key=lambda row: row.case.rpartition(", ")[0], reverse=True)
    rows.show(found)
    rows.write(options.json, found)


def _options() -> Any:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--blocks", type=int, action="append", help="default 1, 256 and 8000")
    parser.add_argument("--rounds", type=int, help="default 200")
    parser.add_argument("--quick", action="store_true", help="to see that it runs: a second")
    found = parser.parse_args()
    found.rounds = found.rounds or (4 if found.quick else 200)
    found.blocks = found.blocks or BLOCKS
    return found


if __name__ == "__main__":
    main()
