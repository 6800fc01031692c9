"""Many consumers at one side channel, beside the steps of its engine.

The producer publishes 80 layers, beside engine steps of some milliseconds of Python and numpy, then
a wait, as for a device. The consumers are real clients in other processes: they shake hands all at
once, and then watch, by the code of an engine. They decode no layouts, which would be done on other
machines. A bare ROUTER that answers the same bytes takes turns with the server: clients and steps
want the same cores.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import numpy as np
import zmq

from benchmarks import engines, harness
from benchmarks.engines import INCARNATION, Shape
from benchmarks.harness import Row, WorkerProcess, row
from kvferry.core.directory import EncodedReply
from kvferry.core.directory.pings import start_pings
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.options import DEFAULTS
from kvferry.core.security import NEARBY, OPEN
from kvferry.core.side_channel.connection import asked
from kvferry.core.side_channel.dialer import Dialer
from kvferry.core.side_channel.server import BACKLOG, HandshakeServer
from kvferry.core.side_channel.tasks import Task, call
from kvferry.core.side_channel_messages import (
    NEWEST_PROTOCOL,
    OLDEST_PROTOCOL,
    PayloadRequest,
    Payloads,
    Pong,
    decode_request,
    encode,
)

NAME = "prefill"
LAYERS, BLOCKS = 80, 20_000
LIMIT_SECONDS = DEFAULTS.handshake_timeout
STEP_SECONDS, WAIT_SECONDS = 0.004, 0.006
"""Of an engine's step on the CPU, and its wait for the device."""
PROCESSES, THREADS = 4, 250
"""That consumers come from, and how many handshakes each has under way at a time."""
SETTLE_SECONDS = 5.0  # until watches that begin together have spread their pings
CPU_SHARE = 0.05  # of a core, that watching consumers may take from the producer


class Producer:
    """An engine's side channel, its steps, and a bare socket that answers the same."""

    def __init__(self, ranks: int) -> None:
        harness.many_files()
        raw = engines.payloads(engines.engine(Shape(tp=ranks), LAYERS, BLOCKS), NAME)
        self._server = HandshakeServer(raw, engine=NAME, incarnation=INCARNATION, access=NEARBY)
        self._bare = zmq.Context().socket(zmq.ROUTER)
        self._bare.setsockopt(zmq.BACKLOG, BACKLOG)
        self._port = self._bare.bind_to_random_port("tcp://127.0.0.1")
        self._reply = encode(Payloads(ranks=raw))
        self._stop, self._thread = threading.Event(), threading.Thread()
        self._steps: list[float] = []
        self._cpu = self._own = 0.0
        self._table = np.zeros((200, 200))
        threading.Thread(target=self._answer, daemon=True).start()

    def ports(self) -> tuple[int, int]:
        """The server's, and the bare socket's."""
        return self._server.port, self._port

    def answer(self) -> int:
        """The bytes of an answer."""
        return len(self._reply)

    def begin(self) -> None:
        """Make steps from now on."""
        self._steps = []
        self._stop.clear()
        self._cpu = time.process_time()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> tuple[float, float]:
        """Make none any more; the seconds of the median step, and the CPU seconds of all else."""
        self._stop.set()
        self._thread.join()
        return float(np.median(self._steps)), time.process_time() - self._cpu - self._own

    def memory(self) -> int:
        """Bytes of the process."""
        return harness.resident()

    def _run(self) -> None:
        while not self._stop.is_set():
            start, end = time.perf_counter(), time.thread_time() + STEP_SECONDS
            while time.thread_time() < end:  # so that what else runs makes it longer, not less
                self._table += 1.0
                sum(range(200))
            self._steps.append(time.perf_counter() - start)
            time.sleep(WAIT_SECONDS)
        self._own = time.thread_time()

    def _answer(self) -> None:
        while True:
            *envelope, message = self._bare.recv_multipart()
            is_ask = isinstance(decode_request(message), PayloadRequest)
            reply = self._reply if is_ask else encode(Pong(incarnation=INCARNATION))
            self._bare.send_multipart([*envelope, reply])


class Consumers:
    """Some of the consumers."""

    def __init__(self) -> None:
        harness.many_files()
        self._tasks: list[Task] = []
        self._lost: list[str] = []

    def ask(self, port: int, count: int) -> float:
        """All shake hands at once; after how many seconds the last had its answer."""
        request = PayloadRequest(oldest=OLDEST_PROTOCOL, newest=NEWEST_PROTOCOL, engine=NAME)
        dialer = Dialer(host="127.0.0.1", port=port, timeout=60.0, access=OPEN, key=b"")

        def one(_: int) -> None:
            reply = call(asked(dialer, request, time.monotonic() + 60.0))
            if not isinstance(reply, Payloads):
                raise SystemExit(f"an answer of {type(reply).__name__}")

        start = time.perf_counter()
        with ThreadPoolExecutor(min(count, THREADS)) as pool:
            list(pool.map(one, range(count)))
        return time.perf_counter() - start

    def watch(self, port: int, count: int) -> None:
        """Watch as so many engines."""
        self._lost.clear()
        reply = EncodedReply(
            address=PeerKey(engine=NAME, host="127.0.0.1", port=port),
            incarnation=Incarnation(INCARNATION),
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

    def leave(self) -> list[str]:
        """Watch no longer; why watches had ended before."""
        for task in self._tasks:
            task.cancel()
        return self._lost


def measure(ranks: int, quick: bool) -> Iterator[Row]:
    """Handshakes of 1,000 consumers at once; then watches."""
    count, rounds, seconds = (50, 1, 2.0) if quick else (1_000, 5, 15.0)
    with ExitStack() as stack:
        producer = stack.enter_context(WorkerProcess(partial(Producer, ranks)))
        consumers = [stack.enter_context(WorkerProcess(Consumers)) for _ in range(PROCESSES)]
        run = _Run(producer, consumers, count)
        yield from run.handshakes(rounds)
        yield from run.watches(seconds)


class _Run:
    """The measurements of so many consumers at a producer."""

    def __init__(
        self, producer: WorkerProcess, consumers: Sequence[WorkerProcess], count: int
    ) -> None:
        self._producer, self._consumers, self._count = producer, consumers, count
        self._ports = producer.ask("ports")

    def handshakes(self, rounds: int) -> Iterator[Row]:
        """All shake hands at once: with the server, and with the bare socket; and nobody asks."""
        nbytes = self._producer.ask("answer")
        ways = [
            *(partial(self._beside, partial(self._asked, port)) for port in self._ports),
            partial(self._beside, lambda: time.sleep(1.0)),
        ]
        harness.say(f"{self._count:,} consumers, {nbytes:,} bytes for an answer")
        last, median, cpu = harness.by_turns(ways, rounds).transpose(2, 0, 1)
        cpu = cpu - cpu[2] * last / last[2]
        say = partial(
            row, f"{self._count:,} consumers at once, {nbytes / 1e3:,.0f} KB for an answer"
        )
        limit = f"handshake_timeout, {LIMIT_SECONDS:g} s"
        served, server = "until the last is served", "CPU of the server for each"
        yield say(served, limit, last[0], LIMIT_SECONDS, unit="s", target="≤ 1")
        yield say(served, "our time to a bare socket's", last[0], last[1], unit="s")
        of = "our CPU time to a bare socket's"
        yield say(server, of, cpu[0] / self._count, cpu[1] / self._count, unit="µs")
        name, of = "engine step of 4 ms CPU, median", "the same with a bare socket in its place"
        yield say(name, of, median[0], median[1], unit="ms", target="≤ 1.1")
        of = "the same with nobody asking"
        yield say(name, of, median[0], median[2], unit="ms")

    def watches(self, seconds: float) -> Iterator[Row]:
        """All watch the server for some seconds; then nobody does."""
        before = self._producer.ask("memory")
        for one in self._consumers:
            one.ask("watch", self._ports[0], self._count // len(self._consumers))
        time.sleep(SETTLE_SECONDS)
        _, step, cpu = self._beside(lambda: time.sleep(seconds))
        grown = max(1, self._producer.ask("memory") - before) / self._count
        for why in [why for one in self._consumers for why in one.ask("leave")][:1]:
            raise SystemExit(f"a watch has ended: {why}")
        time.sleep(1.0)
        _, idle_step, idle_cpu = self._beside(lambda: time.sleep(seconds))
        share = max((cpu - idle_cpu) / seconds, 1e-6)
        pings = self._count / DEFAULTS.liveness_interval
        say = partial(row, f"watching: {self._count:,} consumers, {pings:,.0f} pings a second")
        of, name = f"{CPU_SHARE:.0%} of a core", "a core's share"
        yield say(name, of, share, CPU_SHARE, unit="%", target="≤ 1")
        name, of = "engine step of 4 ms CPU, median", "the same while nobody asks"
        yield say(name, of, step, idle_step, unit="ms", target="≤ 1.1")
        yield say("memory of the server for each", "itself", grown, grown, unit="KB")

    def _asked(self, port: int) -> float:
        for one in self._consumers:
            one.begin("ask", port, self._count // len(self._consumers))
        return max(float(one.end()) for one in self._consumers)

    def _beside(self, call: Callable[[], float | None]) -> tuple[float, float, float]:
        """Seconds that a call returns or takes; of the median step beside it; and the CPU seconds
        of all else in the producer meanwhile."""
        self._producer.ask("begin")
        start = time.monotonic()
        found = call()
        wall = time.monotonic() - start
        median, cpu = self._producer.ask("end")
        return wall if found is None else found, median, cpu
