"""Two endpoint processes, and loads while the GPU is busy, checked on the device after each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.metrics import LoadRecord

from .caches import PAGE_TOKENS, CacheShape
from .contexts import ContextReport
from .devices import BusyDevice, Device
from .engines import Engine, Producer
from .outcome import Outcome, Settings, gigabytes_per_second, median, milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is loaded.

    Attributes:
        shape: the shape of both caches.
        loads: how many loads there are.
        pages: how many pages each has.
    """

    shape: CacheShape
    loads: int
    pages: int


FULL = Size(shape=CacheShape(pages=2048, layers=16, piece_bytes=64 << 10), loads=200, pages=64)
SMALL = Size(shape=CacheShape(pages=64, layers=4, piece_bytes=8 << 10), loads=20, pages=8)


def run(settings: Settings) -> Outcome:
    """Load again and again, check every byte on the device, and compare threads and contexts."""
    size = SMALL if settings.rehearsal else FULL
    device, outcome = Device(settings.near), Outcome()
    with Producer(settings.far) as producer:
        producer.open(settings.driver, size.shape)
        with Engine(settings.driver, device, size.shape, "near") as engine:
            before = engine.entered.report(), producer.contexts()
            with BusyDevice(device) as busy:
                records, wrong = _loads(engine, producer, size)
            after = engine.entered.report(), producer.contexts()
    _judge_loads(outcome, size, records, wrong)
    outcome.notes.append(f"{busy.products} matrix products ran meanwhile on the default stream.")
    devices = device, Device(settings.far)
    for name, where, first, last in zip(
        ("consumer", "producer"), devices, before, after, strict=True
    ):
        _judge_contexts(outcome, name, where, first, last)
    return outcome


def _loads(engine: Engine, producer: Producer, size: Size) -> tuple[list[LoadRecord], list[int]]:
    """Return the figures of each load, and how many words were wrong right after it."""
    rng, check = random.Random(0), engine.device.new_stream()
    records, wrong = [], []
    for number in range(size.loads):
        source, target = (_pages(rng, size) for _ in range(2))
        tokens = size.pages * PAGE_TOKENS - number % PAGE_TOKENS
        ticket = producer.prefill(f"request-{number}", source, number, tokens)
        with engine.device.on(check):
            expected = engine.cache.expected(source, number, tokens)
            index = engine.cache.index(target)
        engine.device.wait(check)
        records.append(engine.load(ticket, target, engine.poison(target)))
        with engine.device.on(check):  # nothing orders this stream after what filled the pages
            wrong.append(engine.cache.wrong_words(index, expected))
    return records, wrong


def _pages(rng: random.Random, size: Size) -> list[int]:
    return rng.sample(range(1, size.shape.pages), size.pages)


def _judge_loads(
    outcome: Outcome, size: Size, records: Sequence[LoadRecord], wrong: Sequence[int]
) -> None:
    bad = [number for number, words in enumerate(wrong) if words]
    if bad:
        outcome.problems.append(
            f"{len(bad)} of {size.loads} loads were DONE with wrong bytes on the device: "
            f"{', '.join(map(str, bad[:10]))}"
        )
    seconds = [record.seconds for record in records]
    outcome.tables["loads under matrix products"] = [
        {
            "loads": len(records),
            "with wrong bytes": len(bad),
            "MiB each": records[0].nbytes >> 20,
            "copies each": records[0].copies,
            "median ms": milliseconds(median(seconds)),
            "longest ms": milliseconds(max(seconds)),
            "median GB/s": gigabytes_per_second(records[0].nbytes, median(seconds)),
            "path": records[-1].path,
        }
    ]
    outcome.details["wrong words"] = list(wrong)
    outcome.details["seconds"] = seconds


def _judge_contexts(
    outcome: Outcome, name: str, device: Device, first: ContextReport, last: ContextReport
) -> None:
    if device.is_cuda:
        outcome.problems += [f"{name}: {problem}" for problem in last.problems(device.index)]
    outcome.details[f"{name} before"] = first.as_dict()
    outcome.details[f"{name} after"] = last.as_dict()
    outcome.tables[f"{name}: threads and contexts"] = [
        {
            "when": when,
            "threads that chose the device": len(report.entered),
            "that did not": ", ".join(report.not_entered) or "none",
            "GPUs with a context": ", ".join(map(str, report.active)) or "none",
            "MiB used by GPU": _used(report),
        }
        for when, report in (("before", first), ("after", last))
    ]


def _used(report: ContextReport) -> str:
    return ", ".join(f"{gpu}: {mib:,}" for gpu, mib in report.used_mib.items()) or "not known"
