"""An engine of one rank on a device, and a producer engine in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry import EndpointOptions, Ticket, create_transport
from kvferry.core.layout import Layout
from kvferry.core.metrics import LoadRecord
from kvferry.integrations.vllm.device import device_zero_function
from kvferry.testing import CacheShape as ModelShape
from kvferry.testing import ModelFreeEngine
from kvferry.testing.peer_process import PeerServer, PeerSetup
from kvferry.testing.peers import Process
from tests.long.gpu.device import Cache, CacheShape, Device

LOAD_SECONDS = 30.0
OPTIONS = EndpointOptions(load_timeout=LOAD_SECONDS, liveness_interval=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceShape(ModelShape):
    """A cache that is not numpy's, and its layout."""

    cache: Any
    described: Layout

    def new_cache(self, rank: int) -> Any:
        return self.cache

    def layout(self, rank: int, cache: Any) -> Layout:
        return self.described


class Engine(ModelFreeEngine):
    """An engine without a model whose cache lies on a device."""

    def __init__(self, driver: str, device: Device, shape: CacheShape, name: str) -> None:
        self.device = device
        device.enter()
        self.stream = device.new_stream()
        self.cache = Cache(device, shape)
        super().__init__(
            name,
            _DeviceShape(pages=shape.pages, cache=self.cache.tensor, described=self.cache.layout),
            driver=driver,
            transport=lambda: create_transport(driver, enter=device.enter),
            options=OPTIONS,
            zero=device_zero_function([self.cache.tensor]),
            enter=device.enter,
        )

    def poison(self, pages: Sequence[int]) -> Callable[[], bool]:
        """Enqueue the overwriting of pages with NaNs; the result tells when that is done."""
        with self.device.on(self.stream):
            self.cache.poison(pages)
            return self.device.record()

    def prefill(
        self, request: str, pages: Sequence[int], seed: int, tokens: int, *, wait: bool = False
    ) -> Ticket:
        """Enqueue the writing of a request's pages, or ``wait`` for it, and return the ticket."""
        self.take_on(request)
        with self.device.on(self.stream):
            self.cache.fill(pages, seed, tokens)
            filled = self.device.record()
        if wait:
            self.device.wait(self.stream)
        ticket = self.finish(request, list(pages), tokens, computed=filled(), order=False)
        self.step(filled)
        return ticket

    def load(
        self, ticket: Ticket, pages: Sequence[int], passed: Callable[[], bool] | None = None
    ) -> LoadRecord:
        """Load a request, as ``pull`` does; return its figures as soon as it is reported."""
        self.pull(ticket.request, ticket, list(pages), passed=passed)
        results = self.outcome(ticket.request, 2 * LOAD_SECONDS)
        for error in results.failed.values():
            raise error
        return results.loads[0]

    def load_checked(
        self,
        producer: Producer,
        source: Sequence[int],
        target: Sequence[int],
        seed: int,
        tokens: int,
    ) -> tuple[LoadRecord, int]:
        """Load pages that the producer has written; the figures, and how many words are wrong."""
        expected, index = self.cache.expected(source, seed, tokens), self.cache.index(target)
        poisoned = self.poison(target)
        self.device.wait()
        ticket = producer.prefill(f"request-{seed}", source, seed, tokens, wait=True)
        record = self.load(ticket, target, poisoned)
        return record, self.cache.wrong_words(index, expected)


class Producer(Process):
    """An ``Engine`` on a device, in a process of its own, which a test can kill."""

    def __init__(self, device: str) -> None:
        self._device = device
        super().__init__(
            "kvferry.drivers.loopback:LoopbackTransport",
            {},
            "cpu",
            4096,
            server=f"{__name__}:ProducerCommands",
        )

    def open(self, driver: str, shape: CacheShape) -> None:
        """Make the engine; an earlier one is closed first."""
        self.ask("open", self._device, driver, shape)

    def prefill(
        self, request: str, pages: Sequence[int], seed: int, tokens: int, *, wait: bool = False
    ) -> Ticket:
        """See ``Engine.prefill``."""
        ticket: Ticket = self.ask("prefill", request, list(pages), seed, tokens, wait)
        return ticket


class ProducerCommands(PeerServer):
    """The commands of the producer's process, whose own transport nobody uses."""

    def __init__(self, setup: PeerSetup) -> None:
        super().__init__(setup)
        self._engines: list[Engine] = []
        self._count = 0

    def open(self, device: str, driver: str, shape: CacheShape) -> None:
        while self._engines:
            self._engines.pop().close()
        self._count += 1
        name = f"producer-{os.getpid()}-{self._count}"
        self._engines.append(Engine(driver, Device(device), shape, name))

    def prefill(self, request: str, pages: list[int], seed: int, tokens: int, wait: bool) -> Ticket:
        return self._engines[0].prefill(request, pages, seed, tokens, wait=wait)
