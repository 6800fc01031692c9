"""A decode engine in this process, producers in other processes, and the link between them."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.ticket import Ticket
from tests.core.endpoint.engines import Engine
from tests.faults.cable import Channel, StagedCable, StagedTransport, staged_transport
from tests.faults.engine_processes import (
    LEASE,
    LONG_LEASE,
    OPTIONS,
    SHAPE,
    TOKENS,
    EngineProcess,
    engine_process,
    handshake_in_progress,
    run_producer,
)
from tests.waiting import eventually

LOCAL = [3, 4]


class ProducerProcess:
    """A producer process and, if ``proxied``, a proxy in front of its side channel."""

    def __init__(self, name: str, driver: str, stack: ExitStack, *, proxied: bool) -> None:
        self._name, self._driver = name, driver
        self._stack = stack
        self._proxied = proxied
        self.process: EngineProcess
        self.port = self.start()
        self.channel = stack.enter_context(closing(Channel(self.port)))
        self.served: set[str] = set()
        self.lease = LEASE

    def start(self, port: int = 0) -> int:
        """Start a process of the producer and return the port of its side channel."""
        started = engine_process(run_producer, port, self._name, self._driver)
        self.process = self._stack.enter_context(started)
        self.served = set()
        return int(self.process.answer())

    def restart(self) -> None:
        """Kill the process and start the same engine again, at the same port."""
        self.process.kill()
        self.start(self.port)

    def serve(self, request: str, how: str = "serve") -> Ticket:
        ticket: Ticket = self.process.ask(how, request, self.lease)
        self.served.add(request)
        return replace(ticket, port=self.channel.port) if self._proxied else ticket

    def pause(self) -> None:
        """Keep the side channel from answering until ``resume``."""
        if self._proxied:
            self.channel.cut()
        else:
            self.process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._proxied:
            self.channel.cut(frozenset())
        else:
            self.process.signal(signal.SIGCONT)

    def expect_released(self) -> None:
        """Wait until the pages of every request are released, and reported so exactly once."""
        eventually(lambda: self.process.ask("held") == 0, "no page is held")
        eventually(lambda: set(self.process.ask("count")) >= self.served, "all are reported sent")
        counts = self.process.ask("count")
        assert set(counts.values()) == {1}, counts


class EnginePair:
    """A decode engine and a producer, for loads during which a fault happens."""

    def __init__(
        self, name: str, decode: Engine, driver: StagedTransport, stack: ExitStack, *, proxied: bool
    ) -> None:
        self.decode, self.driver = decode, driver
        self._name, self._stack, self._proxied = name, stack, proxied
        self.producer = self.start_producer()
        self.endpoint = decode.ranks[0].endpoint
        self.reported: Counter[RequestId] = Counter()
        self._failed: dict[RequestId, KVFerryError] = {}

    def start_producer(self, name: str = "prefill") -> ProducerProcess:
        return ProducerProcess(name, self._name, self._stack, proxied=self._proxied)

    @property
    def cable(self) -> StagedCable:
        assert isinstance(self.driver, StagedCable)
        return self.driver

    @property
    def is_cut(self) -> bool:
        return isinstance(self.driver, StagedCable) and self.driver.is_cut

    def cut(self) -> None:
        """Cut the link: neither the side channel nor the driver carries anything."""
        self.cable.is_cut = True
        self.producer.channel.cut()

    def mend(self) -> None:
        """Mend the link; what has waited goes on."""
        if isinstance(self.driver, StagedCable):
            self.driver.mend()
        self.producer.channel.mend()

    def begin_load(self, request: str, ticket: Ticket) -> None:
        for rank in self.decode.ranks:
            rank.cache[:, LOCAL] = -1.0
        self.decode.pull(request, ticket, LOCAL)

    def outcome(self, request: str) -> str:
        """Wait for the end of a load and return its outcome; check the bytes of loaded pages."""
        name = RequestId(request)

        def over() -> bool:
            self._collect_results()
            return self.reported[name] > 0

        eventually(over, f"{request} is reported", seconds=90.0)
        error = self._failed.get(name)
        assert error is not None or not self.decode.wrong_bytes(LOCAL, TOKENS), (
            "bytes of something else"
        )
        return "loaded" if error is None else type(error).__name__

    def load(self, request: str, ticket: Ticket) -> str:
        self.begin_load(request, ticket)
        return self.outcome(request)

    def begin_load_until(self, stage: str, act: Callable[[], object]) -> None:
        """Begin a load, and call ``act`` when the load reaches a stage."""
        ticket = self.producer.serve("p-1")
        if stage == "before the handshake":
            act()
            self.begin_load("d-1", ticket)
        elif stage == "during the handshake":
            self.producer.pause()
            self.begin_load("d-1", ticket)
            eventually(handshake_in_progress, "the handshake is under way")
            before = self.producer.process
            act()
            if self.producer.process is before and before.process.is_alive() and not self.is_cut:
                self.producer.resume()
        else:
            self.driver.at[stage] = act
            self.begin_load("d-1", ticket)

    def outcome_or_quarantine(self, request: str) -> str:
        """Return the outcome of a load, or that its pages are quarantined until the fault ends."""
        name = RequestId(request)

        def known() -> bool:
            self._collect_results()
            return self.reported[name] > 0 or not self.endpoint.healthy

        eventually(known, f"{request} is reported, or its pages are quarantined", seconds=90.0)
        return self.outcome(request) if self.reported[name] else "quarantined until it went on"

    def expect_recovery(self) -> None:
        """End the fault: the next load works, no page is held, and nothing was reported twice."""
        self.mend()
        # A producer that has just come back may be considered dead once more.
        self.load("d-2", self.producer.serve("p-2"))
        self.producer.lease = LONG_LEASE
        assert self.load("d-3", self.producer.serve("p-3")) == "loaded"
        self.producer.expect_released()
        self._collect_results()
        assert set(self.reported.values()) == {1}, self.reported
        assert self.endpoint.pending == 0
        assert self.endpoint.healthy

    def _collect_results(self) -> None:
        results = self.endpoint.results()
        self.reported.update(results.received)
        self._failed.update(results.failed)


@contextmanager
def engine_pair(
    options: EndpointOptions = OPTIONS, *, driver: str = "loopback", proxied: bool = True
) -> Iterator[EnginePair]:
    """Start a decode engine and a producer. The driver loopback simulates a cable."""
    near = StagedCable() if driver == "loopback" else staged_transport(driver)
    with (
        ExitStack() as stack,
        Engine("decode", SHAPE, options=options, transport=lambda: near) as decode,
    ):
        yield EnginePair(driver, decode, near, stack, proxied=proxied)
