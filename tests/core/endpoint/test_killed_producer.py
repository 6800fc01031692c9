"""A producer in a process of its own, which is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from kvferry.core.errors import ConnectError, PeerLostError
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.testing.engines import CacheShape
from tests.core.endpoint.engines import Engine

TOKENS = 8


def run_producer(pipe: Connection) -> None:
    """Run a producer with two ranks; send a ticket for every number received."""
    with Engine("prefill", CacheShape(tp=2)) as prefill:
        for number in iter(pipe.recv, None):
            pages = [1 + 2 * number, 2 + 2 * number]
            pipe.send(prefill.serve(f"p-{number}", pages, TOKENS))


@contextlib.contextmanager
def producer() -> Iterator[tuple[BaseProcess, Connection]]:
    """Start a producer process; yield it with a pipe for asking it for tickets."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_producer, args=(theirs,), daemon=True)
    process.start()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()


def ticket(pipe: Connection, number: int) -> Ticket:
    pipe.send(number)
    made: Ticket = pipe.recv()
    return made


def test_loads_from_a_killed_producer_fail_and_its_successor_serves(decode: Engine) -> None:
    with producer() as (process, pipe):
        assert decode.load("d-0", ticket(pipe, 0), [3, 4]) is None
        unused_ticket = ticket(pipe, 1)
        process.kill()
        process.join()
        assert isinstance(decode.load("d-1", unused_ticket, [5, 6]), PeerLostError)
        assert isinstance(decode.load("d-2", unused_ticket, [5, 6]), ConnectError)
        with producer() as (_, successor):
            assert decode.load("d-3", ticket(successor, 2), [5, 6]) is None
