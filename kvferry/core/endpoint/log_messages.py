"""Log messages of an endpoint: a failure is one line, with its stage, cause and remedy."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from kvferry.core.endpoint.load import Load
from kvferry.core.endpoint.peers import Peer
from kvferry.core.error_causes import on_one_line, with_remedy
from kvferry.core.errors import Cause, KVFerryError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.metrics import LoadRecord
from kvferry.core.side_channel.sockets import place

logger = logging.getLogger(__name__)

BURST_SECONDS = 1.0
"""Requests whose leases expire within this time of a warning share the next warning."""
NAMED_REQUESTS = 3
"""The most requests that such a warning names."""


def loaded(load: Load, error: KVFerryError | None, record: LoadRecord) -> None:
    """Log that a load is over, with its figures, and why it failed, if it did."""
    if error is not None:
        _not_loaded(load, error, record)
    elif not load.reads:
        logger.debug("request %s: nothing to pull from engine %s", load.request, record.engine)
    else:
        logger.debug(
            "request %s: this rank pulled %d tokens, %d bytes (%d early) in %d copies from engine "
            "%s in %.1f ms",
            load.request,
            record.tokens,
            record.nbytes,
            record.early_nbytes,
            record.copies,
            record.engine,
            record.seconds * 1e3,
        )


def _not_loaded(load: Load, error: KVFerryError, record: LoadRecord) -> None:
    logger.log(
        logging.DEBUG if error.cause is Cause.GIVEN_UP else logging.WARNING,
        "request %s: %s request %s of engine %s at %s (stage %s, cause %s): %s",
        on_one_line(load.request),
        "not loaded from" if load.reads else "it needs no pages, which could not be said to",
        on_one_line(load.ticket.request),
        on_one_line(record.engine),
        on_one_line(place(load.ticket.host, load.ticket.port)),
        record.stage,
        error.cause,
        with_remedy(error),
    )


def given_up(peer: Peer, error: KVFerryError) -> None:
    """Log that a producer is disconnected for an error; at DEBUG if no load is lost with it."""
    logger.log(
        logging.WARNING if peer.loads else logging.DEBUG,
        "engine %s at %s: given up with %d loads (stage connection, cause %s): %s",
        on_one_line(peer.key.engine),
        on_one_line(place(peer.key.host, peer.key.port)),
        peer.loads,
        error.cause,
        with_remedy(error),
    )


def untold(peer: Peer, rank: int, count: int, error: KVFerryError) -> None:
    """Log that "done" or "abandon" for ``count`` requests could not be sent to a producer rank."""
    logger.warning(
        "%d requests: rank %d of engine %s was not told that they are over (stage release, cause "
        "%s): %s; their leases end them, so nothing is to be done",
        count,
        rank,
        on_one_line(peer.key.engine),
        error.cause,
        on_one_line(str(error)),
    )


class ExpiredHolds:
    """Log the requests whose leases expired, those of a burst in one line. One thread at a time."""

    def __init__(self) -> None:
        self._waiting: list[RequestId] = []
        self._quiet_until = -math.inf
        self._silence: float | None = None

    def add(
        self, requests: Sequence[RequestId], now: float, *, silence: float | None = None
    ) -> None:
        """Log requests, or keep them for a warning after ``BURST_SECONDS``. Call it in every round.

        ``silence`` is for how long no consumer was heard, if a longer lease would not have helped.
        """
        self._silence = silence
        self._waiting += requests
        if self._waiting and now >= self._quiet_until:
            self._quiet_until = now + BURST_SECONDS
            self.close()

    def close(self) -> None:
        """Log the requests that are kept."""
        requests, self._waiting = self._waiting, []
        if not requests:
            return
        whose, clients, them = (
            ("its", "its client", "it")
            if len(requests) == 1
            else ("their", "their clients", "them")
        )
        advice = f"let decode take {them} sooner, or set a longer kv_lease_duration"
        if self._silence is not None:
            advice = (
                "see whether decode runs, and whether the router sends it requests: for "
                f"{self._silence:.0f} s, no decode engine gave a sign of life"
            )
        logger.warning(
            "%s: nobody read %s pages within the lease; they are given back (stage held, cause "
            "expired; if %s did not go away, %s)",
            _named(requests),
            whose,
            clients,
            advice,
        )


def _named(requests: Sequence[RequestId]) -> str:
    """Return requests as text for a log line; of many, how many they are, and the first."""
    named = ", ".join(map(on_one_line, requests[:NAMED_REQUESTS]))
    more = len(requests) - NAMED_REQUESTS
    if len(requests) == 1:
        return f"request {named}"
    return f"{len(requests)} requests ({named}{f' and {more} more' if more > 0 else ''})"
