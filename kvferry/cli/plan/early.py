"""What early tickets save: how long until decode has the cache of a prompt, by a formula.

With an early ticket, the pages of a chunk are moved while prefill computes the next chunks. Prefill
is taken to compute at an even rate, and the network to carry nothing else.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from kvferry.cli.plan.engines import SettingsError
from kvferry.cli.plan.estimate import Estimate

_RATE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([kKMGT]?)(i?)(bit|bps|B)(?:/s)?")
_SLOWEST, _FASTEST = 1.0, 1e15  # limits of a bandwidth, in bytes per second


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """What the network carries from prefill to decode; ``text`` is as it was given."""

    text: str
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpeed:
    """How many tokens prefill computes in a step and a second, and when decode reads then."""

    chunk: int
    prefill_rate: float
    hop_seconds: float


def parse_bandwidth(text: str) -> Bandwidth:
    """Return the bandwidth of a text such as ``25Gbit``, ``40MB/s`` or ``1.5GiB/s``.

    ``Gb`` is refused, because it is used for bits and for bytes.
    """
    match, rate = _RATE.fullmatch(text.strip()), 0.0
    if match is not None:
        number, prefix, binary, unit = match.groups()
        power = " KMGT".index(prefix.upper() or " ")
        rate = float(number) * (1024 if binary else 1000) ** power / (1 if unit == "B" else 8)
    if not _SLOWEST <= rate <= _FASTEST:
        raise SettingsError(
            f"--bandwidth {text[:32]!r} is no rate from {_SLOWEST:g}B/s to {_FASTEST / 1e12:g}TB/s:"
            " write a number with a unit, bits as in 25Gbit, or bytes as in 40MB/s or 1.5GiB/s"
        )
    return Bandwidth(text=text.strip(), bytes_per_second=rate)


def early_case(prefill: PrefillSpeed, bandwidth: Bandwidth, estimate: Estimate) -> dict[str, Any]:
    """Return how long until decode has the cache of a prompt, by a network of this bandwidth.

    That is by an ordinary ticket (``sequential_seconds``) and by an early one. ``late_bytes`` are
    of sliding windows and states, which are moved after prefill's end.
    """
    prompt, chunk, rate = estimate.tokens, prefill.chunk, bandwidth.bytes_per_second
    early = sum(read.early_bytes for read in estimate.reads)
    late = estimate.total["bytes"] - early
    chunks = -(-prompt // chunk)
    computing, moving = prompt / prefill.prefill_rate, (early + late) / rate
    # Moving is busy from some chunk on until the end, so the end is the largest, over the chunks,
    # of the time when a chunk is computed plus the time that it and all later ones take to be
    # moved. Both are linear in the chunk's index, but for a shorter last chunk, so only the first
    # and the last two chunks can give the largest.
    end = late / rate + max(
        min(index * chunk, prompt) / prefill.prefill_rate
        + (prompt - (index - 1) * chunk) * early / prompt / rate
        for index in (1, max(1, chunks - 1), chunks)
    )
    sequential = computing + prefill.hop_seconds + moving
    return {
        "bandwidth": asdict(bandwidth),
        "prompt": prompt,
        "chunks": chunks,
        "early_bytes": early,
        "late_bytes": late,
        "prefill_seconds": computing,
        "move_seconds": moving,
        "sequential_seconds": sequential,
        "early_seconds": end,
        "saved": 1 - end / sequential,
    }
