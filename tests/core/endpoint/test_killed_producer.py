"""A producer in a process of its own, which is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest

from kvferry.core.errors import HandshakeError, KVFerryError, PeerLostError
from kvferry.core.lifecycle.holds import RequestId
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


def failure(decode: Engine, request: str) -> KVFerryError:
    return decode.outcome(request).failed[RequestId(request)]


def test_loads_from_a_killed_producer_fail_and_its_successor_serves() -> None:
    with producer() as (process, pipe), Engine("decode") as decode:
        decode.pull("d-0", ticket(pipe, 0), [3, 4])
        assert not decode.outcome("d-0").failed
        unused_ticket = ticket(pipe, 1)
        process.kill()
        process.join()
        decode.pull("d-1", unused_ticket, [5, 6])
        assert isinstance(failure(decode, "d-1"), PeerLostError)
        decode.pull("d-2", unused_ticket, [5, 6])
        assert isinstance(failure(decode, "d-2"), HandshakeError)
        with producer() as (_, successor):
            decode.pull("d-3", ticket(successor, 2), [5, 6])
            assert not decode.outcome("d-3").failed


def test_a_load_from_a_producer_killed_before_the_handshake_fails() -> None:
    with producer() as (process, pipe), Engine("decode") as decode:
        made = ticket(pipe, 0)
        process.kill()
        process.join()
        decode.pull("d-0", made, [3, 4])
        with pytest.raises(HandshakeError, match=str(made.port)):
            raise failure(decode, "d-0")
