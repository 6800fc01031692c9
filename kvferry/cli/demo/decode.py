"""The demo's decode engine and router: one rank, in the process of the command itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.cli.demo.model import (
    WORD_BYTES,
    DemoError,
    Request,
    scattered_pages,
    with_room,
    wrong_spare_bytes,
)
from kvferry.core.endpoint import EndpointOptions, LoadRecord
from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.digest import digest
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.transport import Transport
from kvferry.testing.engines import CacheShape, ModelFreeEngine

COPY_ROUNDS = 3

Advance = Callable[[], None]
"""A function to call when one more part of a step of the demo is over, for the progress bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """The loads of all requests.

    Attributes:
        records: The record of each load, by request id.
        seconds: Seconds from the start of the first load until the last load was reported.
    """

    records: dict[str, LoadRecord]
    seconds: float

    @property
    def nbytes(self) -> int:
        """Number of bytes that all loads read."""
        return sum(record.nbytes for record in self.records.values())

    @property
    def copies(self) -> int:
        """Number of copies of all loads."""
        return sum(record.copies for record in self.records.values())

    @property
    def piece(self) -> int:
        """Bytes of a copy, on average."""
        return self.nbytes // max(self.copies, 1)

    @property
    def handshake(self) -> float:
        """Seconds of the longest handshake; all loads wait for the same one."""
        return max(record.handshake_seconds for record in self.records.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRates:
    """Speeds of copies within one process, in bytes per second.

    Attributes:
        gather: Of pieces as small and as scattered as those that were loaded.
        memcpy: Of the same bytes in one piece.
    """

    gather: float
    memcpy: float


class Decode:
    """The decode engine: a cache in which every byte is ``POISON`` at first, and an endpoint.

    Attributes:
        pages: The ids of each request's pages.
        engine: The engine, which the caller closes.
    """

    def __init__(
        self,
        transport: Transport,
        driver: str,
        shape: CacheShape,
        requests: Sequence[Request],
        lease: float,
    ) -> None:
        self.pages = scattered_pages(shape, requests, seed=2)
        self.engine = ModelFreeEngine(
            "decode",
            with_room(shape, requests),
            driver=driver,
            transport=lambda: transport,
            options=EndpointOptions(lease=lease, load_timeout=lease),
        )
        [self._rank] = self.engine.ranks

    def pull(self, tickets: dict[Request, Ticket], advance: Advance) -> Pulled:
        """Load all requests at once, and return the records of the loads."""
        begun = time.perf_counter()
        for request, ticket in tickets.items():
            self._load(request, ticket)
        records: dict[str, LoadRecord] = {}
        for request in tickets:
            results = self.engine.outcome(request.name, math.inf)
            for name, error in results.failed.items():
                raise DemoError(f"{name} was not loaded: {error}") from error
            [records[request.name]] = results.loads
            advance()
        return Pulled(records=records, seconds=time.perf_counter() - begun)

    def pull_again(self, request: Request, ticket: Ticket) -> KVFerryError | None:
        """Load a request again with its used ticket; return the error, ``None`` without one."""
        self._load(request, ticket)
        failed = self.engine.outcome(request.name, math.inf).failed
        return failed.get(RequestId(request.name))

    def wrong_bytes(self, advance: Advance) -> dict[str, int]:
        """Compare every byte of the cache, and return the number of wrong bytes by request id.

        The key ``pages of no request`` has the number of wrong bytes in all other pages.
        """
        wrong: dict[str, int] = {}
        for request, pages in self.pages.items():
            wrong[request.name] = self._rank.wrong_bytes(pages, request.tokens, request.first_token)
            advance()
        used = [page for pages in self.pages.values() for page in pages]
        wrong["pages of no request"] = wrong_spare_bytes(self._rank, used)
        return wrong

    def local_rates(self, pulled: Pulled) -> LocalRates:
        """Return the speed of numpy for the same bytes, the best of ``COPY_ROUNDS``."""
        words = self._rank.cache.reshape(-1)[: pulled.nbytes // WORD_BYTES]
        width = max(pulled.piece // WORD_BYTES, 1)
        pieces = words[: len(words) // width * width].reshape(-1, width)
        target = np.empty_like(pieces)
        target.fill(0)  # the system must have mapped its pages before the clock starts
        order = np.random.default_rng(3).permutation(len(pieces))
        # With "clip", numpy writes into the target at once; no index is out of range.
        gather = _best_seconds(lambda: np.take(pieces, order, axis=0, out=target, mode="clip"))
        memcpy = _best_seconds(lambda: np.copyto(target, pieces))
        return LocalRates(gather=pieces.nbytes / gather, memcpy=pieces.nbytes / memcpy)

    def _load(self, request: Request, ticket: Ticket) -> None:
        """Check that a ticket is for a request's prompt, and start to load the request."""
        if ticket.digest != digest(request.prompt):
            raise DemoError(f"the ticket of {ticket.request} is not about {request.name}'s prompt")
        self.engine.pull(request.name, ticket, self.pages[request])


def _best_seconds(copy: Callable[[], object]) -> float:
    """Return the seconds of the fastest of ``COPY_ROUNDS`` calls."""
    best = float("inf")
    for _ in range(COPY_ROUNDS):
        begun = time.perf_counter()
        copy()
        best = min(best, time.perf_counter() - begun)
    return best
