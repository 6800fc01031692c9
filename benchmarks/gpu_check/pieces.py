"""The same bytes in many small pieces and in few large ones, by both orders of a cache."""

from __future__ import annotations

import random

from .caches import PAGE_TOKENS, CacheShape
from .devices import Device
from .engines import Engine, Producer
from .outcome import (
    Outcome,
    Settings,
    TableRow,
    gigabytes_per_second,
    median,
    milliseconds,
)

LAYERS, PIECE_BYTES = 80, 8 << 10
"""Of one rank of Llama 3 70B with tensor parallelism of 8, in pages of 16 tokens, K and V."""

REQUEST_PAGES = 512
SMALL_REQUEST_PAGES = 8
ROUNDS = 7


def run(settings: Settings) -> Outcome:
    """Load one request of 8,192 tokens from caches in the orders LBHNC and BLHNC."""
    pages = SMALL_REQUEST_PAGES if settings.rehearsal else REQUEST_PAGES
    outcome, rows = Outcome(), list[TableRow]()
    with Producer(settings.far) as producer:
        for by_page in (False, True):
            shape = CacheShape(
                pages=2 * pages + 1, layers=LAYERS, piece_bytes=PIECE_BYTES, by_page=by_page
            )
            rows.append(_measure(settings, producer, shape, pages, outcome))
    outcome.tables[f"{pages * PAGE_TOKENS:,} tokens"] = rows
    slow, fast = (float(row["median ms"]) for row in rows)
    outcome.notes.append(f"In large pieces the load takes {fast / slow:.2f} of the time.")
    return outcome


def _measure(
    settings: Settings, producer: Producer, shape: CacheShape, pages: int, outcome: Outcome
) -> TableRow:
    rng, records = random.Random(0), []
    producer.open(settings.driver, shape)
    with Engine(settings.driver, Device(settings.near), shape, "near") as engine:
        for number in range(ROUNDS + 1):
            # Every second page, so that no two lie side by side.
            source, target = (rng.sample(range(1, shape.pages, 2), pages) for _ in range(2))
            tokens = pages * PAGE_TOKENS
            ticket = producer.prefill(f"request-{number}", source, number, tokens, wait=True)
            expected = engine.cache.expected(source, number, tokens)
            index = engine.cache.index(target)
            records.append(engine.load(ticket, target, engine.poison(target)))
            if engine.cache.wrong_words(index, expected):
                outcome.problems.append(f"wrong bytes in round {number} of {shape}")
    first, *later = records
    seconds = median([record.seconds for record in later])
    return {
        "order": "BLHNC" if shape.by_page else "LBHNC",
        "copies": first.copies,
        "KiB each": first.nbytes // first.copies >> 10,
        "first ms": milliseconds(first.seconds),
        "median ms": milliseconds(seconds),
        "of it posting": milliseconds(median([record.post_seconds for record in later])),
        "GB/s": gigabytes_per_second(first.nbytes, seconds),
        "path": first.path,
    }
