"""The zeroing of pages, against a reference, and behind a long kernel on the default stream."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from kvferry.core.memory import region_of
from kvferry.core.planner.build_copies import Spans, SpanSegment
from kvferry.integrations.vllm.zeroing import device_zero_function

from .caches import POISON
from .devices import Device
from .outcome import Outcome, Settings, Stopwatch, median, milliseconds

KERNEL_SECONDS = 1.0
MOST_OF_KERNEL = 0.5
"""The part of the kernel's time that zeroing may take behind it; it should take much less."""
ROUNDS = 5


def run(settings: Settings) -> Outcome:
    """Zero spans of two caches, compare every byte, and time it beside a long kernel."""
    device, outcome = Device(settings.near), Outcome()
    device.enter()
    nbytes = (1 << 20) if settings.rehearsal else (256 << 20)
    caches = [device.zeros(nbytes) for _ in range(2)]
    spans, expected = _spans_and_reference(device, caches)
    zero = device_zero_function(caches)
    alone = [_zero(device, caches, zero, spans, expected, outcome)[0] for _ in range(ROUNDS)]
    row: dict[str, str | int | float] = {
        "spans": len(spans),
        "MiB": int(spans.nbytes.sum()) >> 20,
        "alone, first ms": milliseconds(alone[0]),
        "alone, median ms": milliseconds(median(alone)),
    }
    if device.is_cuda:
        seconds, kernel = _zero(device, caches, zero, spans, expected, outcome, kernel=True)
        row |= {
            "behind a kernel, ms": milliseconds(seconds),
            "kernel, ms": milliseconds(kernel),
            "ratio to the kernel": float(f"{seconds / kernel:.3g}"),
        }
        if seconds > MOST_OF_KERNEL * kernel:
            outcome.problems.append(
                f"zeroing waited for a kernel on the default stream: {seconds:.3f} s, and the "
                f"kernel takes {kernel:.3f} s"
            )
    else:
        outcome.notes.append("No kernel runs beside it on a CPU.")
    outcome.tables["zeroing"] = [row]
    return outcome


def _spans_and_reference(device: Device, caches: list[Any]) -> tuple[Spans, list[Any]]:
    """Return spans of all caches, and the words that each cache must have afterwards."""
    rng, addresses, lengths, segments, expected = np.random.default_rng(0), [], [], [], []
    start = 0
    for cache in caches:
        region, words = region_of(cache), len(cache)
        # Each in a part of its own, so none overlap: 4 KiB of every 16 KiB, at an odd place.
        first = np.arange(0, words - 4096, 4096) + rng.integers(0, 3072)
        count = rng.integers(1, 1024, len(first))
        reference = np.full(words, POISON, np.int32)
        for at, n in zip(first, count, strict=True):
            reference[at : at + n] = 0
        addresses.append(first * 4 + region.address)
        lengths.append(count * 4)
        segments.append(SpanSegment(start=start, stop=start + len(first), region=region))
        expected.append(device.torch.from_numpy(reference).to(device.name))
        start += len(first)
    spans = Spans(
        address=np.concatenate(addresses).astype(np.uint64),
        nbytes=np.concatenate(lengths).astype(np.uint64),
        segments=tuple(segments),
    )
    return spans, expected


def _zero(
    device: Device,
    caches: list[Any],
    zero: Any,
    spans: Spans,
    expected: list[Any],
    outcome: Outcome,
    *,
    kernel: bool = False,
) -> tuple[float, float]:
    """Zero poisoned caches in a thread, as an endpoint does.

    Returns:
        The seconds of the zeroing, and those of the kernel that ran beside it.
    """
    for cache in caches:
        cache.fill_(POISON)
    device.wait()
    took: list[float] = []

    def call() -> None:
        device.enter()
        watch = Stopwatch()
        zero(spans)
        took.append(watch.seconds)

    thread, whole = threading.Thread(target=call, name="gpu-check-zero"), Stopwatch()
    if kernel:
        device.spin(KERNEL_SECONDS)
    thread.start()
    thread.join()
    # On a stream of its own, so that this does not wait for the kernel either.
    stream = device.new_stream()
    with device.on(stream):
        wrong = [int((c != e).sum().item()) for c, e in zip(caches, expected, strict=True)]
    device.wait()
    if not took or any(wrong):
        outcome.problems.append(f"zeroing left {sum(wrong):,} words other than the reference")
    return (took[0] if took else 0.0), whole.seconds
