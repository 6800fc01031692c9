"""An engine of one rank on a device, and a producer engine in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Self

import msgspec
import numpy as np

from kvferry import (
    Endpoint,
    EndpointOptions,
    HandshakeServer,
    Identity,
    Load,
    Pages,
    SchedulerHolds,
    Ticket,
    create_transport,
)
from kvferry.core.directory import LocalDirectory
from kvferry.core.layout.host_page_format import HostPageFormat
from kvferry.core.lifecycle.digest import digest
from kvferry.core.lifecycle.holds import RequestId, random_incarnation
from kvferry.core.lifecycle.host_pages import HostPages, Reservation
from kvferry.core.lifecycle.page_copy import PageCopy
from kvferry.core.messages import RankPayload
from kvferry.core.metrics import LoadRecord
from kvferry.core.planner.zeroing import zero_cpu
from kvferry.core.side_channel_messages import encode
from kvferry.integrations.vllm.host_pool import HostPool
from kvferry.integrations.vllm.zeroing import device_zero_function

from .caches import Cache, CacheShape
from .contexts import ContextReport, EnterLog
from .devices import Device

START_SECONDS = 120.0
"""How long a process may take to import torch and to make its context."""
ANSWER_SECONDS = 60.0
LOAD_SECONDS = 30.0

OPTIONS = EndpointOptions(load_timeout=LOAD_SECONDS, liveness_interval=1.0)


class Engine:
    """A cache on a device, and the endpoint that serves and fills it.

    Args:
        driver: the name of the transport's driver.
        device: where the cache lies.
        shape: the shape of the cache.
        name: the engine's id.
        staged: whether peers get host pages instead of the cache; pinned ones on a GPU.
    """

    def __init__(
        self, driver: str, device: Device, shape: CacheShape, name: str, *, staged: bool = False
    ) -> None:
        device.enter()
        self.device = device
        self.entered = EnterLog(device)
        self.entered()
        self.stream = device.new_stream()
        self.cache = Cache(device, shape)
        self._stack = ExitStack()
        layout, zero = self.cache.layout, device_zero_function([self.cache.tensor])
        self._host_pages = HostPages(range(1, shape.pages), patience=LOAD_SECONDS)
        self._pool: HostPool | None = None
        if staged:
            form = HostPageFormat.of(layout)
            self._pool = HostPool(
                [self.cache.tensor],
                form,
                shape.pages,
                device=device.torch.device(device.name),
                enter=self.entered,
                pin=device.is_cuda,
            )
            self._stack.callback(self._pool.close)
            layout, zero = form.layout(self._pool.region, shape.pages), zero_cpu
        self.endpoint = Endpoint(
            identity=Identity(engine=name, incarnation=random_incarnation()),
            driver=driver,
            transport=create_transport(driver, enter=self.entered),
            layout=layout,
            slots=shape.pages,
            options=OPTIONS,
            zero=zero,
            enter=self.entered,
            copies=self._pool,
        )
        self._stack.callback(self.endpoint.close)
        self.endpoint.join([self.endpoint.payload])
        self._directory = LocalDirectory(OPTIONS, [self.endpoint])
        self._stack.callback(self._directory.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the endpoint, and free the cache afterwards."""
        self._stack.close()

    def poison(self, pages: Sequence[int]) -> Callable[[], bool]:
        """Enqueue the overwriting of pages with NaNs; the result tells when that is done."""
        with self.device.on(self.stream):
            self.cache.poison(pages)
            return self.device.record()

    def load(
        self,
        ticket: Ticket,
        pages: Sequence[int],
        passed: Callable[[], bool] | None = None,
    ) -> LoadRecord:
        """Load a request, and return its figures as soon as the endpoint reports it.

        Args:
            ticket: the producer's ticket.
            pages: the pages to fill.
            passed: tells whether earlier work on the pages is done.

        Raises:
            KVFerryError: the load failed.
        """
        request = RequestId(ticket.request)
        copy = self._host_copy(request, pages)
        load = Load(
            request=request,
            ticket=ticket,
            ranges=((0, ticket.tokens),),
            local=(Pages(ids=np.array(copy.pages if copy else pages, dtype=np.int64)),),
            copy=copy,
        )
        self.endpoint.load(load, passed)
        self._directory.begin(request, ticket)
        while True:
            self.endpoint.wait(LOAD_SECONDS)
            results = self.endpoint.results()
            if request in results.received:
                break
        self._host_pages.give_back(request)
        if request in results.failed:
            raise results.failed[request]
        return next(record for record in results.loads if record.request == request)

    def _host_copy(self, request: RequestId, pages: Sequence[int]) -> PageCopy | None:
        """Take host pages for a request; ``None`` if the engine is not staged."""
        if self._pool is None:
            return None
        taken = self._host_pages.take(request, len(pages))
        if taken is None:
            raise RuntimeError(f"{len(pages)} of {self._host_pages.total} host pages are not free")
        return PageCopy(blocks=tuple(pages), pages=taken)


class ServingEngine(Engine):
    """An engine that serves its cache to others: it has a side channel and makes tickets."""

    def __init__(
        self, driver: str, device: Device, shape: CacheShape, name: str, *, staged: bool = False
    ) -> None:
        super().__init__(driver, device, shape, name, staged=staged)
        payload: RankPayload = self.endpoint.payload
        self._holds = SchedulerHolds(shape.pages)
        self._server = HandshakeServer(
            [encode(payload)], engine=payload.engine, incarnation=payload.incarnation
        )
        self._stack.callback(self._server.close)

    def prefill(
        self, request: str, pages: Sequence[int], seed: int, tokens: int, *, wait: bool = False
    ) -> Ticket:
        """Enqueue the writing of a request's pages, and return the ticket for it.

        Args:
            request: this engine's id of the request.
            pages: the pages to fill.
            seed: what the content depends on.
            tokens: how many tokens the request has.
            wait: whether to wait until the pages are written, and make the ticket then.
        """
        name = RequestId(request)
        self._take_ended()
        while self._pool and self._host_pages.reserve(name, len(pages)) is Reservation.WAITING:
            self.endpoint.wait(LOAD_SECONDS)
            self._take_ended()
        hold = self._holds.take_on(name)
        self.endpoint.apply(self._holds.drain())
        with self.device.on(self.stream):
            self.cache.fill(pages, seed, tokens)
            filled = self.device.record()
        if wait:
            self.device.wait(self.stream)
        copy = self._host_copy(name, pages)
        readable = copy.pages if copy else tuple(pages)
        self._holds.ticket(name, OPTIONS.lease, frozenset(readable), copy=copy)
        self.endpoint.apply(self._holds.drain(), filled)
        if hold is None:
            raise RuntimeError(f"all {self.cache.shape.pages} slots are in use")
        payload = self.endpoint.payload
        return Ticket(
            engine=payload.engine,
            incarnation=payload.incarnation,
            request=request,
            host=self._server.host,
            port=self._server.port,
            hold=hold,
            pages=(readable,),
            first_index=(0,),
            tokens=tokens,
            digest=digest([seed]),
            computed=copy is None and filled(),
        )

    def _take_ended(self) -> None:
        for each in self.endpoint.results().ended:
            self._host_pages.give_back(each.request)
            self._holds.sent(each.request)


class Producer:
    """A ``ServingEngine`` in a process of its own, which a check can kill.

    Args:
        device: the name of the device.
    """

    def __init__(self, device: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            code = f"from {__name__} import serve; serve({theirs.fileno()}, {device!r})"
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._connection = Connection(ours.detach())

    def __enter__(self) -> Self:
        self._answer(START_SECONDS)
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self._connection.close()

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        self.process.kill()
        self.process.wait()

    def open(self, driver: str, shape: CacheShape, *, staged: bool = False) -> None:
        """Make the engine; an earlier one is closed first."""
        self._ask("open", driver, shape, staged)

    def prefill(
        self, request: str, pages: Sequence[int], seed: int, tokens: int, *, wait: bool = False
    ) -> Ticket:
        """See ``ServingEngine.prefill``."""
        text: bytes = self._ask("prefill", request, list(pages), seed, tokens, wait)
        return msgspec.json.decode(text, type=Ticket)

    def contexts(self) -> ContextReport:
        """Return the threads and contexts of the process."""
        report: ContextReport = self._ask("contexts")
        return report

    def _ask(self, command: str, *arguments: object) -> Any:
        self._connection.send((command, arguments))
        return self._answer(ANSWER_SECONDS)

    def _answer(self, seconds: float) -> Any:
        if not self._connection.poll(seconds):
            raise TimeoutError(f"the producer's process has not answered in {seconds:g} s")
        try:
            done, answer = self._connection.recv()
        except EOFError:
            status = self.process.wait()
            raise RuntimeError(f"the producer's process ended with status {status}") from None
        if not done:
            raise RuntimeError(f"in the producer's process: {answer}")
        return answer


class _Commands:
    """The commands of the producer's process."""

    def __init__(self, device: str) -> None:
        self._device = Device(device)
        self._engine: ServingEngine | None = None
        self._count = 0

    def open(self, driver: str, shape: CacheShape, staged: bool) -> None:
        if self._engine is not None:
            self._engine.close()
        self._count += 1
        name = f"producer-{os.getpid()}-{self._count}"
        self._engine = ServingEngine(driver, self._device, shape, name, staged=staged)

    def prefill(self, request: str, pages: list[int], seed: int, tokens: int, wait: bool) -> bytes:
        ticket = self._opened.prefill(request, pages, seed, tokens, wait=wait)
        return msgspec.json.encode(ticket)

    def contexts(self) -> ContextReport:
        return self._opened.entered.report()

    @property
    def _opened(self) -> ServingEngine:
        if self._engine is None:
            raise RuntimeError("no engine was opened")
        return self._engine


def serve(descriptor: int, device: str) -> None:
    """Execute commands until the other end of the connection is closed, and end the process."""
    connection = Connection(descriptor)
    commands = _Commands(device)
    connection.send((True, None))
    while True:
        try:
            command, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            break
        try:
            answer = True, getattr(commands, command)(*arguments)
        except Exception as exc:  # noqa: BLE001 - the other process raises it
            traceback.print_exc()
            answer = False, f"{type(exc).__name__}: {exc}"
        connection.send(answer)
    os._exit(0)  # some transport libraries crash in their exit handlers
