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
from tests.faults.cable import Cable, Channel, Staged, staged
from tests.faults.stages import LEASE, LONG, OPTIONS, SHAPE, Remote, produce, remote, right, shaking

LOCAL = [3, 4]


class Far:
    """A producer: its process, and a proxy before its side channel, if it is ``proxied``."""

    def __init__(self, name: str, driver: str, stack: ExitStack, *, proxied: bool) -> None:
        self._name, self._driver = name, driver
        self._stack = stack
        self._proxied = proxied
        self.process: Remote
        self.port = self.start()
        self.channel = stack.enter_context(closing(Channel(self.port)))
        self.served: set[str] = set()
        self.lease = LEASE

    def start(self, port: int = 0) -> int:
        """Start the process, or a new one; the port of its side channel."""
        started = remote(produce, port, self._name, self._driver)
        self.process = self._stack.enter_context(started)
        self.served = set()
        return int(self.process.answer())

    def restart(self) -> None:
        """Another start of the same engine, at the same port."""
        self.process.kill()
        self.start(self.port)

    def serve(self, request: str, how: str = "serve") -> Ticket:
        ticket: Ticket = self.process.ask(how, request, self.lease)
        self.served.add(request)
        return replace(ticket, port=self.channel.port) if self._proxied else ticket

    def pause(self) -> None:
        """Its side channel does not answer for now."""
        if self._proxied:
            self.channel.cut()
        else:
            self.process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._proxied:
            self.channel.cut(frozenset())
        else:
            self.process.signal(signal.SIGCONT)

    def released(self) -> None:
        """Every request's pages have come back, each once."""
        eventually(lambda: self.process.ask("held") == 0, "no page is held any more")
        eventually(lambda: set(self.process.ask("count")) >= self.served, "all are reported sent")
        counts = self.process.ask("count")
        assert set(counts.values()) == {1}, counts


class Bench:
    """Loads, one of which goes through something."""

    def __init__(
        self, name: str, decode: Engine, driver: Staged, stack: ExitStack, *, proxied: bool
    ) -> None:
        self.decode, self.driver = decode, driver
        self._name, self._stack, self._proxied = name, stack, proxied
        self.far = self.another()
        self.endpoint = decode.ranks[0].endpoint
        self.reported: Counter[RequestId] = Counter()
        self._failed: dict[RequestId, KVFerryError] = {}

    def another(self, name: str = "prefill") -> Far:
        """A producer of that name."""
        return Far(name, self._name, self._stack, proxied=self._proxied)

    @property
    def cable(self) -> Cable:
        """The driver, where it is one that can be cut."""
        assert isinstance(self.driver, Cable)
        return self.driver

    @property
    def is_cut(self) -> bool:
        """Whether nothing passes."""
        return isinstance(self.driver, Cable) and self.driver.is_cut

    def cut(self) -> None:
        """Nothing passes from now on, over the side channel or the driver."""
        self.cable.is_cut = True
        self.far.channel.cut()

    def mend(self) -> None:
        """All is well with the way, and what has waited goes on."""
        if isinstance(self.driver, Cable):
            self.driver.mend()
        self.far.channel.mend()

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
            if self.far.process is before and before.process.is_alive() and not self.is_cut:
                self.far.resume()
        else:
            self.driver.at[stage] = act
            self.begin("d-1", ticket)

    def outcome_or_quarantine(self, request: str) -> str:
        """How a load ended, unless that cannot be said until what happened is over."""
        name = RequestId(request)

        def known() -> bool:
            self._listen()
            return self.reported[name] > 0 or not self.endpoint.healthy

        eventually(known, f"{request} is reported, or its pages are quarantined", seconds=90.0)
        return self.outcome(request) if self.reported[name] else "quarantined until it went on"

    def through(self, stage: str, act: Callable[[], None]) -> str:
        """Likewise, and how it ended."""
        self.begin_until(stage, act)
        return self.outcome("d-1")

    def goes_on(self) -> None:
        """What was wrong is over: the next load works, no page is held, nothing was said twice."""
        self.mend()
        # A producer that has just come back may still be taken for dead, once.
        self.load("d-2", self.far.serve("p-2"))
        self.far.lease = LONG
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
def bench(
    options: EndpointOptions = OPTIONS, *, driver: str = "loopback", proxied: bool = True
) -> Iterator[Bench]:
    """One of each. Loopback is over a cable."""
    near = Cable() if driver == "loopback" else staged(driver)
    with (
        ExitStack() as stack,
        engine("decode", SHAPE, options=options, transport=lambda: near) as decode,
    ):
        yield Bench(driver, decode, near, stack, proxied=proxied)
