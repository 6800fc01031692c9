"""What the driver ucx gets out of UCX: beside NIXL over the same transports, and its loop of calls.

    python benchmarks/ucx.py [--over shm] [--over tcp] [--megabytes 160] [--rounds 15]
                             [--library PATH] [--quick] [--json FILE]

Other processes have a buffer each; this one reads them, in blocks in random order
and in a row, by turns through the driver and through NIXL's own Python API. A time is from the call
until the bytes have landed. ``ratio`` is the median of the ratios round by round, with its interval
of 95 % confidence; beside it stands the same between two agents of NIXL: where that is not about 1,
the machine was too busy to tell. ``CPU`` is the ratio of the CPU times of this process meanwhile.
``socket``, over tcp, is the ratio to a TCP connection that moves the same bytes and nothing else.

Then, what it takes to post 40,000 scattered copies of 4 KiB, in CPU time, by the compiled loop and
by the one in Python: of calls that do nothing, which is the loop itself, and of UCX's, which do
some or all of the work before they return (over tcp the driver makes none).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial

import common
import nixl_api
import numpy as np
import posting
import rows
import tcp_baseline

from kvferry.core.memory import Region, region_of
from kvferry.core.transport import PeerId, Transport
from kvferry.drivers.nixl import NixlTransport, library
from kvferry.drivers.ucx import UcxTransport

TRANSPORTS = {"shm": ["self", "sm", "tcp"], "tcp": ["self", "tcp"]}
SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10)
ORDERS = ("random", "in a row")
GOAL, SMALL_IN_A_ROW = 1.0, 0.2
"""The largest ratios that the project holds itself to: the second of blocks of 4 KiB in a row."""
THREADS = 4
"""Of NIXL's UCX, as vLLM's own connector has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of the table; times in milliseconds, medians."""

    over: str
    order: str
    block: int
    copies: int
    driver_ms: float
    nixl_ms: float
    ratio: common.Ratio
    noise: common.Ratio
    cpu: common.Ratio
    socket: common.Ratio | None


def main() -> None:
    options = _options()
    if options.serve:
        _serve(options)
    conditions = _conditions(options)
    ways = options.over or list(TRANSPORTS)
    results = [one for over in ways for one in _beside_nixl(over, options)]
    # Over tcp the driver sends messages.
    posted = [over for over in ways if over != "tcp"]
    loops = [posting.nothing(options.rounds), *(_posting(over, options) for over in posted)]
    _show(results, conditions)
    posting.show(loops)
    made = [row for one in results for row in _rows(one)]
    made.sort(key=lambda row: row.section)
    rows.write(options.json, made + [posting.row(one) for one in loops])
    common.leave()


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--over", action="append", choices=TRANSPORTS, help="default: each")
    parser.add_argument("--megabytes", type=int, default=160, help="of each buffer")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--library", help="the driver's option of that name")
    parser.add_argument("--quick", action="store_true", help="to see that it runs")
    parser.add_argument("--driver", choices=("ucx", "nixl", "socket"), help=argparse.SUPPRESS)
    found = parser.parse_args()
    if found.quick:
        found.rounds, found.megabytes = 3, 160  # room for the copies that are posted
    return found


def _beside_nixl(over: str, options: argparse.Namespace) -> Iterator[Result]:
    _configure_nixl(over)
    with ExitStack() as stack:
        transport, peer, local, near = stack.enter_context(_connected(over, options))
        theirs, far = stack.enter_context(_peer("nixl", over, options))
        agents = [nixl_api.agent(local, theirs, THREADS) for _ in range(2)]
        plain = [stack.enter_context(_socket(options))] if over == "tcp" else []
        for order in ORDERS:
            for block in SIZES:
                scattered = order == "random"
                copies = common.blocks(local, near, block, scattered=scattered)
                others = common.blocks(local, far, block, scattered=scattered)
                moves = [
                    common.mover(transport, peer, copies),
                    *(nixl_api.mover(*agent, others) for agent in agents),
                    *plain,
                ]
                times = common.by_turns(options.rounds, [common.timed(move) for move in moves])
                yield _result(over, order, block, len(copies), times)


def _posting(over: str, options: argparse.Namespace) -> posting.Posting:
    with _connected(over, options) as (transport, peer, local, near):
        copies = common.blocks(local, near, posting.BLOCK, posting.COPIES)
        return posting.of_ucx(over, transport, peer, copies, options.rounds)


@contextmanager
def _connected(
    over: str, options: argparse.Namespace
) -> Iterator[tuple[UcxTransport, PeerId, Region, Region]]:
    """A transport with a buffer, and a peer with another."""
    buffer = np.ones(options.megabytes << 20, np.uint8)
    local = region_of(buffer)
    with _peer("ucx", over, options) as (address, remote), closing(_ucx(over, options)) as ucx:
        ucx.register(local)
        yield ucx, ucx.connect(address), local, remote


def _result(over: str, order: str, block: int, copies: int, times: common.Times) -> Result:
    driver, nixl, other, *plain = times[:, :, 0]
    return Result(
        over=over,
        order=order,
        block=block,
        copies=copies,
        driver_ms=round(float(np.median(driver)) * 1e3, 3),
        nixl_ms=round(float(np.median(nixl)) * 1e3, 3),
        ratio=common.ratio(driver, nixl),
        noise=common.ratio(other, nixl),
        cpu=common.ratio(times[0, :, 1], times[1, :, 1]),
        socket=common.ratio(driver, plain[0]) if plain else None,
    )


def _configure_nixl(over: str) -> None:
    """NIXL's UCX takes its settings from the environment, when an agent is made."""
    os.environ["UCX_TLS"] = ",".join(TRANSPORTS[over])
    # Without it NIXL's UCX does not use what the driver does on one host.
    os.environ["UCX_CMA_MEMORY_INVALIDATE"] = "y"


def _ucx(over: str, options: argparse.Namespace) -> UcxTransport:
    return UcxTransport(transports=TRANSPORTS[over], library=options.library)


def _peer(
    driver: str, over: str, options: argparse.Namespace
) -> AbstractContextManager[tuple[bytes, Region]]:
    arguments = [f"--driver={driver}", f"--over={over}", f"--megabytes={options.megabytes}"]
    arguments += [f"--library={options.library}"] * bool(options.library)
    process: AbstractContextManager[tuple[bytes, Region]]
    process = common.second_process(__file__, *arguments)
    return process


def _socket(options: argparse.Namespace) -> AbstractContextManager[Callable[[], None]]:
    made: AbstractContextManager[Callable[[], None]]
    made = tcp_baseline.reader(__file__, "--driver=socket", f"--megabytes={options.megabytes}")
    return made


def _serve(options: argparse.Namespace) -> None:
    buffer = np.ones(options.megabytes << 20, np.uint8)
    if options.driver == "socket":
        tcp_baseline.serve(buffer)
        common.leave()
    transport: Transport
    if options.driver == "ucx":
        transport = _ucx(options.over[0], options)
    else:
        transport = NixlTransport(backend_options={"num_threads": THREADS})
    common.serve(transport, region_of(buffer))
    transport.close()
    common.leave()


def _conditions(options: argparse.Namespace) -> dict[str, object]:
    transport = UcxTransport(library=options.library)
    conditions: dict[str, object] = {
        **common.machine(),
        "megabytes": options.megabytes,
        "rounds": options.rounds,
        "ucx": transport.library,
        "nixl": f"{library.load()}, UCX with {THREADS} threads",
    }
    transport.close()
    return conditions


def _rows(one: Result) -> Iterator[rows.Row]:
    driver, case = f"the driver ucx over {one.over}", f"read of {one.block >> 10} KiB blocks"
    row = partial(rows.compared, case=f"{case}, {one.order}", measured=one.driver_ms, unit="ms")
    small = (one.block, one.order) == (SIZES[0], "in a row")
    target = rows.goal(SMALL_IN_A_ROW if small else GOAL, at_least=False)
    of = "time of NIXL over the same transports"
    yield row(one.ratio, section=f"{driver}, two processes", of=of, target=target)
    if one.socket is not None:
        of = "time of the same bytes over one connection"
        yield row(one.socket, section=f"{driver}, beside a TCP connection", of=of)


def _show(results: list[Result], conditions: dict[str, object]) -> None:
    headings = (
        "over",
        "order",
        "KiB",
        "copies",
        "driver",
        "NIXL",
        "ratio",
        "95 %",
        "noise",
        "CPU",
        "socket",
    )
    rows = [
        (
            one.over,
            one.order,
            f"{one.block >> 10}",
            f"{one.copies:,}",
            f"{one.driver_ms:.2f}",
            f"{one.nixl_ms:.2f}",
            f"{one.ratio.median:.3f}",
            f"{one.ratio.low:.2f}-{one.ratio.high:.2f}",
            f"{one.noise.median:.3f}",
            f"{one.cpu.median:.3f}",
            "" if one.socket is None else f"{one.socket.median:.3f}",
            one.ratio.goal(GOAL),
        )
        for one in results
    ]
    title, caption = "the driver ucx over NIXL", "medians; times in ms"
    common.show(title, headings, rows, conditions, caption=caption, words=3)


if __name__ == "__main__":
    main()
