"""One rank of the demo's prefill engine, as a process; rank 0 is also its scheduler."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from kvferry.cli.demo.model import DemoError, Request, scattered_pages
from kvferry.cli.demo.pipes import (
    DemoStep,
    Failed,
    Joined,
    ReleasedRequest,
    Spec,
    Started,
    Stepped,
    receive,
)
from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.digest import digest
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.side_channel import HandshakeServer
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport.registry import create
from kvferry.testing.engines import EngineRank

PACE_SECONDS = 0.02


class DemoRank:
    """The worker of a rank: computes what the scheduler says, and serves its pages.

    Attributes:
        pages: The ids of each request's pages, the same on every rank.
        endpoint: The rank's endpoint, which the caller closes.
    """

    def __init__(self, spec: Spec, rank: int) -> None:
        self.pages = scattered_pages(spec.shape, spec.requests, seed=1)
        self._rank = EngineRank.start(
            spec.engine,
            spec.incarnation,
            spec.shape,
            rank,
            create(spec.driver),
            driver=spec.driver,
            options=EndpointOptions(lease=spec.lease),
        )
        self.endpoint = self._rank.endpoint

    def step(self, step: DemoStep) -> Stepped:
        """Apply the scheduler's commands of a step, then compute the step's request, if any."""
        self.endpoint.apply(step.orders)
        if (request := step.compute) is not None:
            self._rank.compute(self.pages[request], request.tokens, request.first_token)
        return Stepped(sent=self.endpoint.results().sent)


class Lead:
    """The engine's scheduler: picks holds, makes tickets, and counts the ends of holds.

    A hold keeps a request's pages for decode; it is released when it has ended on every rank.
    """

    def __init__(self, spec: Spec, rank: DemoRank, others: Sequence[Connection]) -> None:
        self._spec, self._rank, self._others = spec, rank, others
        self._holds = SchedulerHolds(len(spec.requests))
        self._sent: Counter[RequestId] = Counter()

    @property
    def held(self) -> int:
        """The number of requests whose pages are held."""
        return self._holds.held

    def compute(self, request: Request, server: HandshakeServer) -> Ticket:
        """Compute a request on every rank, and return its ticket."""
        name = RequestId(request.name)
        self._holds.take_on(name)
        self.step(request)
        hold = self._holds.ticket(name, self._spec.lease)
        if hold is None:
            raise DemoError(f"{name} was not taken on: it is computed twice, or no slot was free")
        self.step()
        return Ticket(
            engine=self._spec.engine,
            incarnation=self._spec.incarnation,
            request=name,
            host=server.host,
            port=server.port,
            hold=hold,
            pages=(tuple(self._rank.pages[request]),),
            first_index=(0,),
            tokens=request.tokens,
            digest=digest(request.prompt),
            computed=True,
            tp_size=self._spec.shape.tp,
        )

    def step(self, request: Request | None = None) -> None:
        """Run one engine step on all ranks at once, and release holds that all ranks have ended."""
        step = DemoStep(orders=self._holds.drain(), compute=request)
        for other in self._others:
            other.send(step)
        stepped = [self._rank.step(step), *(receive(other, Stepped) for other in self._others)]
        for sent in (name for answer in stepped for name in answer.sent):
            self._sent[sent] += 1
            if self._sent[sent] == self._spec.shape.tp:
                self._holds.sent(sent)


def lead(control: Connection, others: Sequence[Connection]) -> None:
    """Run rank 0: start the engine, compute all requests, keep their pages until they are read."""
    spec = receive(control, Spec)
    for other in others:
        other.send(spec)
    rank = DemoRank(spec, 0)
    with rank.endpoint:
        ranks = [receive(other, Joined) for other in others]
        payloads = [encode(rank.endpoint.payload), *(joined.payload for joined in ranks)]
        with HandshakeServer(payloads, engine=spec.engine, incarnation=spec.incarnation) as server:
            pids = (os.getpid(), *(joined.pid for joined in ranks))
            control.send(Started(pids=pids, host=server.host, port=server.port))
            engine = Lead(spec, rank, others)
            for request in spec.requests:
                control.send(engine.compute(request, server))
            while engine.held and not control.poll():
                rank.endpoint.wait(PACE_SECONDS)
                engine.step()
            control.send(ReleasedRequest(requests=len(spec.requests)))
            control.poll(None)  # wait until the other end closes the pipe


def follow(pipe: Connection, index: int) -> None:
    """Run a rank other than 0: execute the steps of rank 0, until it closes the pipe."""
    rank = DemoRank(receive(pipe, Spec), index)
    with rank.endpoint:
        pipe.send(Joined(pid=os.getpid(), payload=encode(rank.endpoint.payload)))
        while True:
            pipe.send(rank.step(receive(pipe, DemoStep)))


def main(rank: int, *descriptors: int) -> int:
    """Run a rank on inherited pipes, and return the exit status of its process."""
    pipes = [Connection(descriptor) for descriptor in descriptors]
    try:
        if rank == 0:
            lead(pipes[0], pipes[1:])
        else:
            follow(pipes[0], rank)
    except (KVFerryError, OSError) as exc:
        with suppress(OSError):  # a closed pipe may be the failure itself
            pipes[0].send(Failed(reason=str(exc)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
