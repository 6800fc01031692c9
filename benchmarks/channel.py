"""How many consumers one side channel serves, and what the engine beside it notices.

    python benchmarks/channel.py [--clients 1000] [--rounds 9] [--quick] [--json FILE]

The server is what an engine runs, in a thread of a process that meanwhile makes engine steps: some
milliseconds of Python and numpy, then a wait, as for a device. The clients are real ones: each has
a connection of its own, asks for what all ranks publish (80 layers) and hangs up; they come all at
once, from other processes. Then they stay, and ask every 5 s whether the engine lives. The limit on
what this machine can do is the same exchange with a bare ROUTER in the server's place, in turns:
clients and steps want the same cores.
"""

from __future__ import annotations

import argparse
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import common
import engines
import numpy as np
import rows
import worker_process
import zmq
from engines import Shape

from kvferry.core.security import NEARBY, OPEN
from kvferry.core.side_channel import HandshakeServer, poller
from kvferry.core.side_channel.connection import SideChannelConnection, asked, connected
from kvferry.core.side_channel.connection_limits import most_connections
from kvferry.core.side_channel.dialer import Dialer
from kvferry.core.side_channel.server import BACKLOG
from kvferry.core.side_channel.shapes import EngineShape
from kvferry.core.side_channel_messages import (
    PayloadRequest,
    Payloads,
    Ping,
    Pong,
    Reply,
    decode_request,
    encode,
)

NAME, INCARNATION = "prefill", 5
LAST_SECONDS = 2.0
STEP_SECONDS = 0.004
"""Of an engine's step on the CPU, without the wait for its device."""
WAIT_SECONDS = 0.006
PROCESSES = 4
"""That clients come from."""
PATIENCE_SECONDS = 60.0
PING_SECONDS = 5.0
STAY_SECONDS = 10.0


class Producer:
    """An engine's side channel, its steps, and a bare socket that answers the same."""

    def __init__(self, layers: int, ranks: int) -> None:
        many_files()
        raw = engines.payloads(engines.engine(Shape(tp=ranks), layers, 20_000), NAME)
        self._server = HandshakeServer(raw, engine=NAME, incarnation=INCARNATION, access=NEARBY)
        self._bare = zmq.Context().socket(zmq.ROUTER)
        self._bare.setsockopt(zmq.BACKLOG, BACKLOG)
        self._port = self._bare.bind_to_random_port("tcp://127.0.0.1")
        whole = Payloads(ranks=raw)
        shape = EngineShape.of(raw)
        if shape is None:
            raise SystemExit("the payloads do not end with their fields")
        self._shape = shape.digest
        self._replies = encode(whole), encode(shape.heads(whole))
        self._reply = self._replies[0]
        threading.Thread(target=self._answer, daemon=True).start()
        self._stop = threading.Event()
        self._steps: list[float] = []
        self._cpu = self._own = 0.0
        self._thread = threading.Thread()
        self._table = np.zeros((200, 200))

    def ports(self) -> tuple[int, int]:
        """The server's, and the bare socket's."""
        return self._server.port, self._port

    def shape(self) -> bytes:
        """The digest of the engine's shape."""
        return self._shape

    def leave_out(self, leave_out: bool) -> int:
        """Choose whether the bare socket leaves out the shape; the bytes of its answer."""
        self._reply = self._replies[leave_out]
        return len(self._reply)

    def most(self) -> int:
        """The most connections that the side channel takes in this process."""
        return most_connections(NEARBY)

    def begin(self) -> None:
        """Make steps from now on."""
        self._steps = []
        self._stop.clear()
        self._cpu = time.process_time()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> tuple[float, float, float]:
        """Make none any more: seconds of the median step and of the slowest of a hundred, and
        the CPU seconds of all else in the process meanwhile."""
        self._stop.set()
        self._thread.join()
        cpu = time.process_time() - self._cpu - self._own
        return float(np.median(self._steps)), float(np.quantile(self._steps, 0.99)), cpu

    def memory(self) -> int:
        """Bytes of the process."""
        found: int = worker_process.resident()
        return found

    def _run(self) -> None:
        while not self._stop.is_set():
            start = time.perf_counter()
            self._step()
            self._steps.append(time.perf_counter() - start)
            time.sleep(WAIT_SECONDS)
        self._own = time.thread_time()

    def _step(self) -> None:
        """Work by CPU time of this thread, so that what else runs makes it longer, not less."""
        end = time.thread_time() + STEP_SECONDS
        while time.thread_time() < end:
            self._table += 1.0
            sum(range(200))

    def _answer(self) -> None:
        while True:
            *envelope, message = self._bare.recv_multipart()
            is_ask = isinstance(decode_request(message), PayloadRequest)
            reply = self._reply if is_ask else encode(Pong(incarnation=INCARNATION))
            self._bare.send_multipart([*envelope, reply])


class Consumers:
    """Some of the clients."""

    def __init__(self, count: int) -> None:
        many_files()
        self._count = count
        self._lines: list[SideChannelConnection] = []

    def ready(self) -> bool:
        """It is made."""
        return True

    def ask(self, port: int) -> list[float]:
        """Each asks for the payloads; how many seconds each waited."""
        return self._all(lambda: fetched(port))

    def stay(self, port: int) -> int:
        """Each makes a connection that it keeps; how many did."""
        self._all(lambda: self._lines.append(_line(port)))
        return len(self._lines)

    def ping(self) -> list[float]:
        """Ask for some seconds whether it lives, all by turns; how many seconds each waited."""
        waited, start = [], time.monotonic()
        pause = PING_SECONDS / len(self._lines)
        due = start
        while time.monotonic() < start + STAY_SECONDS:
            for line in self._lines:
                due += pause
                time.sleep(max(0.0, due - time.monotonic()))
                before = time.perf_counter()
                poller.call(line.ask(Ping(engine=NAME), time.monotonic() + PATIENCE_SECONDS))
                waited.append(time.perf_counter() - before)
        return waited

    def leave(self) -> None:
        """Hang up."""
        for line in self._lines:
            line.close()
        self._lines.clear()

    def _all(self, call: Callable[[], object]) -> list[float]:
        waited: list[float] = []
        gate = threading.Barrier(self._count + 1)

        def one() -> None:
            gate.wait()
            start = time.perf_counter()
            call()
            waited.append(time.perf_counter() - start)

        threads = [threading.Thread(target=one) for _ in range(self._count)]
        for thread in threads:
            thread.start()
        gate.wait()
        for thread in threads:
            thread.join()
        if len(waited) < self._count:
            raise SystemExit(f"{self._count - len(waited)} of {self._count} clients got no answer")
        return waited


WHOLE = PayloadRequest(oldest=1, newest=1, engine=NAME)


def fetched(port: int, request: PayloadRequest = WHOLE, kind: type[Reply] = Payloads) -> None:
    """What a consumer does but for the decoding, which is not the server's and would hold it up."""
    dialer = _dialer(port)
    if not isinstance(
        poller.call(asked(dialer, request, time.monotonic() + PATIENCE_SECONDS)), kind
    ):
        raise SystemExit(f"it did not answer with {kind.__name__}")


def _line(port: int) -> SideChannelConnection:
    return poller.call(connected(_dialer(port)))


def _dialer(port: int) -> Dialer:
    return Dialer(host="127.0.0.1", port=port, timeout=PATIENCE_SECONDS, access=OPEN, key=b"")


def many_files() -> None:
    """As vLLM does: a connection is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_535), hard))


def main() -> None:
    options = _options()
    found = list(_measured(options))
    rows.show(found)
    rows.write(options.json, found)


def _options() -> argparse.Namespace:
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--clients", type=int, default=1_000)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="200 clients, two rounds")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.clients = 2, 200
    return options


def _measured(options: argparse.Namespace) -> Iterator[rows.Row]:
    with ExitStack() as stack:
        say = stack.enter_context(rows.progress(2 * options.rounds + 2))
        say("starts")
        make = partial(Producer, options.layers, options.ranks)
        producer = stack.enter_context(worker_process.WorkerProcess(make))
        some = partial(Consumers, options.clients // PROCESSES)
        consumers = [
            stack.enter_context(worker_process.WorkerProcess(some)) for _ in range(PROCESSES)
        ]
        for each in consumers:
            each.ask("ready")
        yield from _rush(producer, consumers, options, say)
        say("they stay, and ask whether it lives")
        yield from _stay(producer, consumers)


def _rush(
    producer: worker_process.WorkerProcess,
    consumers: Sequence[worker_process.WorkerProcess],
    options: argparse.Namespace,
    say: rows.Show,
) -> Iterator[rows.Row]:
    """All ask at once, round by round: the server and the bare socket; and nobody asks."""
    ports = producer.ask("ports")
    found: list[list[tuple[float, float, float, float]]] = []
    for index in range(options.rounds):
        took = {}
        for which in (0, 1) if index % 2 else (1, 0):
            say(f"{options.clients:,} clients ask the {('server', 'bare socket')[which]}")
            took[which] = _asked(producer, consumers, ports[which])
        took[2] = _asked(producer, [], 0)
        found.append([took[which] for which in range(3)])
    last, median, slow, cpu = np.array(found).transpose(2, 1, 0)
    clients = f"{options.clients:,} at once"
    yield row(
        "side channel",
        f"seconds until the last of {clients} is served",
        last[0],
        "s",
        last[0] / LAST_SECONDS,
        "2 s",
        "≤ 1",
    )
    yield row(
        "side channel",
        f"handshakes per second, {clients}",
        options.clients / last[0],
        "per s",
        last[0] / last[1],
        "our time to a bare socket's",
    )
    spent = (cpu[:2] - cpu[2]) / options.clients * 1e6
    of = "our CPU time to a bare socket's"
    yield row("side channel", "CPU for each handshake", spent[0], "µs", spent[0] / spent[1], of)
    for case, figures in (("median", median), ("slowest of 100", slow)):
        for which, beside in ((1, "a bare socket in its place"), (2, "nobody asking")):
            yield row(
                "engine steps of 4 ms CPU beside it",
                f"{case}, {clients}",
                figures[0] * 1e3,
                "ms",
                figures[0] / figures[which],
                f"the same with {beside}",
                "≤ 1.1" if which == 1 else None,
            )


def _asked(
    producer: worker_process.WorkerProcess,
    consumers: Sequence[worker_process.WorkerProcess],
    port: int,
) -> tuple[float, float, float, float]:
    """Seconds until the last is served; of the steps; and CPU seconds."""
    producer.ask("begin")
    start, waited = time.monotonic(), [0.0]
    for each in consumers:
        each.begin("ask", port)
    for each in consumers:
        waited += each.end()
    time.sleep(max(0.0, 1.0 - (time.monotonic() - start)))
    median, slow, cpu = producer.ask("end")
    return max(waited), median, slow, cpu


def _stay(
    producer: worker_process.WorkerProcess, consumers: Sequence[worker_process.WorkerProcess]
) -> Iterator[rows.Row]:
    """All stay connected, and ask every few seconds."""
    port = producer.ask("ports")[0]
    before = producer.ask("memory")
    for each in consumers:
        each.begin("stay", port)
    count = sum(each.end() for each in consumers)
    grown = (producer.ask("memory") - before) / count
    waited: list[float] = []
    producer.ask("begin")
    start = time.monotonic()
    for each in consumers:
        each.begin("ping")
    for each in consumers:
        waited += each.end()
    seconds = time.monotonic() - start
    median, _, cpu = producer.ask("end")
    producer.ask("begin")
    time.sleep(STAY_SECONDS / 2)
    alone, _, idle = producer.ask("end")
    share = cpu / seconds - idle / (STAY_SECONDS / 2)
    for each in consumers:
        each.ask("leave")
    said = f"{count:,} connections, a ping every {PING_SECONDS:g} s"
    one = np.array([1.0])
    stays = "connections that stay"
    yield row(stays, f"{said}: answered after", np.array(waited) * 1e3, "ms", one, "itself")
    yield row(stays, f"{said}: a core's share", np.array([share]) * 1e2, "%", one, "itself")
    yield row(
        stays,
        f"{said}: engine step of 4 ms CPU",
        np.array([median]) * 1e3,
        "ms",
        np.array([median / alone]),
        "the same while nobody asks",
    )
    yield row(stays, "memory of the server for each", np.array([grown]) / 1e3, "KB", one, "itself")


def row(
    section: str,
    case: str,
    figures: common.Times,
    unit: str,
    ratios: common.Times,
    of: str,
    target: str | None = None,
) -> rows.Row:
    """A row of figures, with the ratios that were found in the rounds."""
    ratio = common.ratio(ratios, np.ones(len(ratios)))
    return rows.compared(
        ratio,
        section=section,
        case=case,
        measured=f"{np.median(figures):,.3g}",
        unit=unit,
        of=of,
        target=target,
    )


if __name__ == "__main__":
    main()
