"""Producers in processes of their own, a decode engine here, and what lies between the two."""

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
from tests.core.endpoint.engines import Engine, engine, eventually
from tests.faults.cable import Cable, Channel
from tests.faults.stages import LEASE, OPTIONS, SHAPE, Remote, produce, remote, right, shaking

LOCAL = [3, 4]


class Far:
    """A producer: its process, and the proxy before its side channel, unless that is left out."""

    def __init__(self, name: str, stack: ExitStack, driver: Cable, *, direct: bool) -> None:
        self._name = name
        self._stack = stack
        self._driver = driver
        self._direct = direct
        self.process: Remote
        self.port = self.start()
        self.channel = stack.enter_context(closing(Channel(self.port)))
        self.served: set[str] = set()
        self.lease = LEASE

    def start(self, port: int = 0) -> int:
        """Start the process, or a new one; the port of its side channel."""
        self.process = self._stack.enter_context(remote(produce, port, self._name))
        self.served = set()
        return int(self.process.answer())

    def restart(self) -> None:
        """Another start of the same engine, at the same port."""
        self.process.kill()
        self.start(self.port)

    def serve(self, request: str, how: str = "serve") -> Ticket:
        ticket: Ticket = self.process.ask(how, request, self.lease)
        self.served.add(request)
        return ticket if self._direct else replace(ticket, port=self.channel.port)

    def pause(self) -> None:
        """Its side channel does not answer for now."""
        if self._direct:
            self.process.signal(signal.SIGSTOP)
        else:
            self.channel.cut()

    def resume(self) -> None:
        if self._direct:
            self.process.signal(signal.SIGCONT)
        elif not self._driver.is_cut:
            self.channel.cut(frozenset())

    def cut(self) -> None:
        """The cable is cut, for everything."""
        self._driver.is_cut = True
        self.channel.cut()

    def mend(self) -> None:
        self._driver.is_cut, self._driver.is_noisy, self._driver.delay = False, False, 0.0
        self.channel.mend()

    def released(self) -> None:
        """Every request's pages have come back, each once."""
        eventually(lambda: self.process.ask("held") == 0, "no page is held any more")
        eventually(lambda: set(self.process.ask("count")) >= self.served, "all are reported sent")
        counts = self.process.ask("count")
        assert set(counts.values()) == {1}, counts


class Bench:
    """Loads, one of which goes through something."""

    def __init__(self, decode: Engine, driver: Cable, stack: ExitStack, *, direct: bool) -> None:
        self.decode, self.driver = decode, driver
        self._stack, self._direct = stack, direct
        self.far = self.another()
        self.endpoint = decode.ranks[0].endpoint
        self.reported: Counter[RequestId] = Counter()
        self._failed: dict[RequestId, KVFerryError] = {}

    def another(self, name: str = "prefill") -> Far:
        """A producer of that name."""
        return Far(name, self._stack, self.driver, direct=self._direct)

    def begin(self, request: str, ticket: Ticket) -> None:
        for rank in self.decode.ranks:
            rank.cache[:, LOCAL] = -1.0
        self.decode.pull(request, ticket, LOCAL)

    def outcome(self, request: str) -> str:
        """How a load ended; bytes that are not the ticket's are no success."""
        name = RequestId(request)

        def over() -> bool:
            self._listen()
            return self.reported[name] > 0

        eventually(over, f"{request} is reported", seconds=90.0)
        error = self._failed.get(name)
        assert error is not None or right(self.decode, LOCAL), "bytes of something else"
        return "loaded" if error is None else type(error).__name__

    def load(self, request: str, ticket: Ticket) -> str:
        self.begin(request, ticket)
        return self.outcome(request)

    def begin_until(self, stage: str, act: Callable[[], None]) -> None:
        """Begin a load to which something happens at a stage."""
        ticket = self.far.serve("p-1")
        if stage == "before the handshake":
            act()
            self.begin("d-1", ticket)
        elif stage == "during the handshake":
            self.far.pause()
            self.begin("d-1", ticket)
            eventually(shaking, "the handshake is under way")
            before = self.far.process
            act()
            if self.far.process is before and before.process.is_alive():
                self.far.resume()
        else:
            self.driver.at[stage] = act
            self.begin("d-1", ticket)

    def through(self, stage: str, act: Callable[[], None]) -> str:
        """Likewise, and how it ended."""
        self.begin_until(stage, act)
        return self.outcome("d-1")

    def goes_on(self) -> None:
        """What was wrong is over: the next load works, no page is held, nothing was said twice."""
        self.far.mend()
        # A producer that has just come back may still be taken for dead, once.
        if self.load("d-2", self.far.serve("p-2")) != "loaded":
            assert self.load("d-3", self.far.serve("p-3")) == "loaded"
        self.far.released()
        self._listen()
        assert set(self.reported.values()) == {1}, self.reported
        assert self.endpoint.pending == 0
        assert self.endpoint.healthy

    def _listen(self) -> None:
        results = self.endpoint.results()
        self.reported.update(results.received)
        self._failed.update(results.failed)


@contextmanager
def bench(options: EndpointOptions = OPTIONS, *, direct: bool = False) -> Iterator[Bench]:
    """One of each; ``direct``: without a proxy."""
    driver = Cable()
    with (
        ExitStack() as stack,
        engine("decode", SHAPE, options=options, transport=lambda: driver) as decode,
    ):
        yield Bench(decode, driver, stack, direct=direct)
