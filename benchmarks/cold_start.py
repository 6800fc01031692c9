"""A thousand consumer engines meet one producer at once, stay, and ask whether it lives.

    python benchmarks/cold_start.py [--engines 1000] [--each 1] [--stay 30] [--rounds 3] [--quick]
                                    [--json FILE]

The producer publishes 8 ranks of 80 layers, beside engine steps of 4 ms CPU. The consumers are real
clients of the handshake, in some processes: first without a known shape, so that they are sent
everything, then with it. They decode no layouts, which would be done on a thousand other machines.
After that all watch the producer, by the code that an endpoint watches with. An engine shakes hands
and watches once (``--each 8``: as if each of its ranks did). A bare ROUTER that answers the same
bytes takes turns with the server, since clients and steps want the same cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import channel
import common
import numpy as np
import rows
import worker_process

from kvferry.core.directory import EncodedReply
from kvferry.core.directory.liveness import start_pings
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.options import DEFAULTS
from kvferry.core.side_channel.poller import Task
from kvferry.core.side_channel_messages import (
    NEWEST_PROTOCOL,
    OLDEST_PROTOCOL,
    PayloadHeads,
    PayloadRequest,
    Payloads,
)

RANKS, LAYERS = 8, 80
LIMIT_SECONDS = DEFAULTS.handshake_timeout
STEP_TARGET, CPU_TARGET = "≤ 1.1", "≤ 1"
CPU_SHARE = 0.05
"""Of a core, that watching consumers may take from the producer."""
THREADS = 250
"""Handshakes that a process of clients has under way at a time, at most."""
SETTLE_SECONDS = 5.0
"""Until watches that begin together have spread their pings."""
WHICH = ("server", "bare socket")


class Consumers:
    """Some of the consumers."""

    def __init__(self) -> None:
        channel.many_files()
        self._tasks: list[Task] = []
        self._lost: list[str] = []

    def ready(self) -> bool:
        """It is made."""
        return True

    def ask(self, port: int, known: Sequence[bytes], count: int) -> list[float]:
        """All shake hands at once; after how many seconds each had its answer."""
        request = PayloadRequest(
            oldest=OLDEST_PROTOCOL, newest=NEWEST_PROTOCOL, engine=channel.NAME, known=list(known)
        )
        kind = PayloadHeads if known else Payloads
        start = time.perf_counter()

        def one(_: int) -> float:
            channel.fetched(port, request, kind)
            return time.perf_counter() - start

        with ThreadPoolExecutor(min(count, THREADS)) as pool:
            return list(pool.map(one, range(count)))

    def watch(self, port: int, count: int) -> int:
        """Watch as so many endpoints; how many do."""
        self._lost.clear()
        reply = EncodedReply(
            address=PeerKey(engine=channel.NAME, host="127.0.0.1", port=port),
            incarnation=Incarnation(channel.INCARNATION),
            ranks=(),
            numeric="127.0.0.1",
        )
        self._tasks = [
            start_pings(
                reply,
                DEFAULTS,
                wanted=lambda: True,
                lost=lambda exc: self._lost.append(str(exc)),
            )
            for _ in range(count)
        ]
        return len(self._tasks)

    def lost(self) -> list[str]:
        """Why watches have ended."""
        return self._lost

    def leave(self) -> None:
        """Watch no longer."""
        for task in self._tasks:
            task.cancel()


def main() -> None:
    options = _options()
    found = list(_measured(options))
    rows.show(found)
    rows.write(options.json, found)


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--engines", type=int, default=1_000)
    parser.add_argument("--each", default="1", help="handshakes and watches of an engine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stay", type=float, default=30.0, help="seconds of watching")
    parser.add_argument("--quick", action="store_true", help="50 engines, one round, 5 s")
    options = parser.parse_args()
    if options.quick:
        options.engines, options.rounds, options.stay = 50, 1, 5.0
    return options


def _measured(options: argparse.Namespace) -> Iterator[rows.Row]:
    each = [int(one) for one in options.each.split(",")]
    with ExitStack() as stack:
        say = stack.enter_context(rows.progress(3 * len(each) + 1))
        say("starts")
        producer = stack.enter_context(
            worker_process.WorkerProcess(partial(channel.Producer, LAYERS, RANKS))
        )
        consumers = [
            stack.enter_context(worker_process.WorkerProcess(Consumers))
            for _ in range(channel.PROCESSES)
        ]
        for one in consumers:
            one.ask("ready")
        most = producer.ask("most")
        for count in each:
            watches = min(options.engines * count, most)
            run = _Run(producer, consumers, f"{options.engines:,} engines, {count} each")
            for is_known in (False, True):
                say(f"{run.who}: handshakes, the shape {'known' if is_known else 'not known'}")
                yield from run.handshakes(options.engines * count, is_known, options.rounds)
            say(f"{run.who}: {watches:,} watches")
            yield from run.watches(watches, options.stay)


class _Run:
    """The measurements with one number of handshakes and watches for each engine.

    Args:
        producer: the producer's process.
        consumers: the processes of the consumers.
        who: the consumers, as rows name them.
    """

    def __init__(
        self,
        producer: worker_process.WorkerProcess,
        consumers: Sequence[worker_process.WorkerProcess],
        who: str,
    ) -> None:
        self._producer = producer
        self._consumers = consumers
        self.who = who

    def handshakes(self, count: int, is_known: bool, rounds: int) -> Iterator[rows.Row]:
        """All shake hands at once, round by round: with the server, and with the bare socket."""
        nbytes = self._producer.ask("leave_out", is_known)
        known = [self._producer.ask("shape")] if is_known else []
        ports = self._producer.ask("ports")
        found = []
        for index in range(rounds):
            took = {}
            for which in (0, 1) if index % 2 else (1, 0):
                took[which] = self._timed(partial(self._asked, ports[which], known, count))
            took[2] = self._timed(lambda: time.sleep(1.0))
            found.append([took[which] for which in range(3)])
        last, median, _, cpu = np.array(found).transpose(2, 1, 0)
        section = f"cold start: {self.who}, {nbytes / 1e3:,.0f} KB for an answer"
        yield channel.row(
            section,
            "seconds until the last is served",
            last[0],
            "s",
            last[0] / LIMIT_SECONDS,
            f"handshake_timeout, {LIMIT_SECONDS:g} s",
            "≤ 1",
        )
        yield channel.row(
            section,
            "the same, beside a bare socket",
            last[0],
            "s",
            last[0] / last[1],
            "our time to a bare socket's",
        )
        spent = (cpu[:2] - cpu[2] * last[:2]) / count * 1e6
        yield channel.row(
            section,
            "CPU of the server for each handshake",
            spent[0],
            "µs",
            spent[0] / spent[1],
            "our CPU time to a bare socket's",
        )
        for which, beside, target in (
            (1, "a bare socket in its place", STEP_TARGET),
            (2, "nobody asking", None),
        ):
            yield channel.row(
                section,
                "engine step of 4 ms CPU, median",
                median[0] * 1e3,
                "ms",
                median[0] / median[which],
                f"the same with {beside}",
                target,
            )

    def watches(self, count: int, seconds: float) -> Iterator[rows.Row]:
        """All watch for some seconds: the server, then the bare socket; then nobody does."""
        ports = self._producer.ask("ports")
        grown, figures = [], []
        for port in ports:
            before = self._producer.ask("memory")
            for one, share in zip(self._consumers, _shares(count, self._consumers), strict=True):
                one.ask("watch", port, share)
            time.sleep(SETTLE_SECONDS)
            figures.append(self._timed(lambda: time.sleep(seconds)))
            grown.append((self._producer.ask("memory") - before) / count / 1e3)
            for one in self._consumers:
                for why in one.ask("lost")[:1]:
                    raise SystemExit(f"a watch has ended: {why}")
                one.ask("leave")
            time.sleep(1.0)
        idle = self._timed(lambda: time.sleep(min(seconds, 10.0)))
        pings = f"{count:,} watches, {count / DEFAULTS.liveness_interval:,.0f} pings a second"
        section = f"watching: {self.who}"
        shares = [each[3] - idle[3] for each in figures]
        ours = np.array(shares[:1])
        yield channel.row(
            section,
            f"{pings}: a core's share",
            ours * 1e2,
            "%",
            ours / CPU_SHARE,
            f"{CPU_SHARE:.0%} of a core",
            CPU_TARGET,
        )
        yield channel.row(
            section,
            f"{pings}: a core's share",
            ours * 1e2,
            "%",
            ours / shares[1],
            "a bare socket's",
        )
        step = np.array([figures[0][1]])
        yield channel.row(
            section,
            f"{pings}: engine step of 4 ms CPU, median",
            step * 1e3,
            "ms",
            step / idle[1],
            "the same while nobody asks",
            STEP_TARGET,
        )
        yield channel.row(
            section,
            "memory of the server for each",
            np.array(grown[:1]),
            "KB",
            np.array([grown[0] / grown[1]]),
            "a bare socket's",
        )

    def _asked(self, port: int, known: Sequence[bytes], count: int) -> float:
        waited = [0.0]
        for one, share in zip(self._consumers, _shares(count, self._consumers), strict=True):
            one.begin("ask", port, known, share)
        for one in self._consumers:
            waited += one.end()
        return max(waited)

    def _timed(self, call: Callable[[], float | None]) -> tuple[float, float, float, float]:
        """Seconds that a call returns or takes; of the median and a slow step beside it; and the
        share of a core of all else in the producer meanwhile, or its CPU seconds."""
        self._producer.ask("begin")
        start = time.monotonic()
        found = call()
        wall = time.monotonic() - start
        median, slow, cpu = self._producer.ask("end")
        if found is None:
            return wall, median, slow, cpu / wall
        return found, median, slow, cpu


def _shares(count: int, among: Sequence[object]) -> list[int]:
    return [(count + index) // len(among) for index in range(len(among))]


if __name__ == "__main__":
    main()
