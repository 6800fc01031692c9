"""Loads by number: request ``d-N`` reads page N of request ``p-N`` into its own page N."""

from __future__ import annotations

from kvferry.core.errors import KVFerryError
from tests.core.endpoint.engines import Engine, eventually

TOKENS = 4
"""Tokens of each of these requests."""


def pull(producer: Engine, decode: Engine, *numbers: int) -> None:
    """Serve and start the loads with these numbers."""
    for number in numbers:
        ticket = producer.serve(f"p-{number}", [number], TOKENS)
        decode.pull(f"d-{number}", ticket, [number])


def outcomes(decode: Engine, *numbers: int) -> list[KVFerryError | None]:
    """Wait until the first rank has reported these loads; return the error of each, if any."""
    found: dict[str, KVFerryError | None] = {}

    def all_reported() -> bool:
        results = decode.ranks[0].endpoint.results()
        found.update({name: results.failed.get(name) for name in results.received})
        for name in results.received:
            decode.directory.end(name)
        return found.keys() >= {f"d-{number}" for number in numbers}

    eventually(all_reported, "all loads are reported")
    return [found[f"d-{number}"] for number in numbers]


def outcome(decode: Engine, number: int) -> KVFerryError | None:
    """Wait until a load is reported; return its error, if any."""
    return outcomes(decode, number)[0]


def load(producer: Engine, decode: Engine, number: int) -> KVFerryError | None:
    """Load one request and return its error, if any."""
    pull(producer, decode, number)
    return outcome(decode, number)
