"""Loads by number: request ``d-N`` reads page N of request ``p-N`` into its own page N."""

from __future__ import annotations

from kvferry.core.errors import KVFerryError
from tests.core.endpoint.engines import Engine

TOKENS = 4
"""Tokens of each of these requests."""


def pull(producer: Engine, decode: Engine, *numbers: int) -> None:
    """Serve and start the loads with these numbers."""
    for number in numbers:
        ticket = producer.serve(f"p-{number}", [number], TOKENS)
        decode.pull(f"d-{number}", ticket, [number])


def outcomes(decode: Engine, *numbers: int) -> list[KVFerryError | None]:
    """Wait until these loads are reported; return the error of each, if any."""
    return [decode.error(f"d-{number}") for number in numbers]


def load(producer: Engine, decode: Engine, number: int) -> KVFerryError | None:
    """Load one request and return its error, if any."""
    ticket = producer.serve(f"p-{number}", [number], TOKENS)
    return decode.load(f"d-{number}", ticket, [number])
