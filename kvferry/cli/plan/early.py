"""What early tickets save: how long until decode has the cache of a prompt, by a formula.

With an ordinary ticket, a prompt's cache is moved after prefill has computed all of it. With an
early one, the pages of a chunk are moved while prefill computes the next chunks. Prefill is taken
to compute at an even rate, and the network to carry nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cli.plan.engines import Engine, EngineError, SettingsError
from kvferry.cli.plan.estimate import Estimate, estimate_reads

_RATE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*(?:([kMGT]?)(bit|bps|B)|([KMGT])iB)(?:/s)?")
_FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SLOWEST, _FASTEST = 1.0, 1e15
"""Limits of a bandwidth, in bytes per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """What the network carries from prefill to decode; ``text`` is as it was given."""

    text: str
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyQuestion:
    """What to compute the effect of early tickets for.

    Attributes:
        prompts: Lengths of prompts in tokens; empty for that of the planned request.
        chunk, prefill_rate: How many tokens prefill computes in a step, and in a second.
        hop_seconds: From prefill's end until decode starts to read, with an ordinary ticket.
    """

    bandwidths: tuple[Bandwidth, ...]
    prompts: tuple[int, ...]
    chunk: int
    prefill_rate: float
    hop_seconds: float

    @property
    def longest(self) -> int:
        """The longest of ``prompts``; 0 if there is none."""
        return max(self.prompts, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyCase:
    """How long until decode has the cache of one prompt, at one bandwidth.

    Attributes:
        chunks: In how many chunks prefill computes the prompt.
        early_bytes: Bytes that may be moved while prefill computes.
        late_bytes: Bytes of sliding windows and states, which are moved after prefill's end.
        sequential_seconds: When decode has the cache, from prefill's start, by an ordinary ticket.
        early_seconds: The same by an early ticket.
    """

    bandwidth: Bandwidth
    prompt: int
    chunks: int
    early_bytes: int
    late_bytes: int
    prefill_seconds: float
    move_seconds: float
    sequential_seconds: float
    early_seconds: float

    @property
    def saved(self) -> float:
        """The part of the sequential time that an early ticket saves, 0 to 1."""
        return 1 - self.early_seconds / self.sequential_seconds


def make_question(
    bandwidths: Sequence[str],
    prompts: Sequence[int],
    chunk: int,
    prefill_rate: float,
    hop_seconds: float,
) -> EarlyQuestion | None:
    """Return what the command's options ask about early tickets; ``None`` for nothing."""
    if not bandwidths and prompts:
        raise SettingsError(
            f"--prompt {prompts[0]} is a prompt for --bandwidth: add --bandwidth, such as 25Gbit, "
            "or give the length of the planned request as --tokens"
        )
    if not bandwidths:
        return None
    return EarlyQuestion(
        bandwidths=tuple(parse_bandwidth(text) for text in bandwidths),
        prompts=tuple(prompts),
        chunk=chunk,
        prefill_rate=prefill_rate,
        hop_seconds=hop_seconds,
    )


def parse_bandwidth(text: str) -> Bandwidth:
    """Return the bandwidth that a text such as ``25Gbit`` or ``40MB/s`` names.

    Units are ``bit`` (or ``bps``) and ``B`` with k, M, G and T for powers of 1,000, and KiB to TiB
    for powers of 1,024; ``/s`` may follow. ``Gb`` is refused, because it is used for both.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise SettingsError(
            f"--bandwidth {text[:32]!r} is no rate: write a number with a unit, bits as in 25Gbit, "
            "or bytes as in 40MB/s or 1.5GiB/s"
        )
    number, prefix, unit, binary = match.groups()
    factor = 1 << 10 * ("KMGT".index(binary) + 1) if binary else _FACTORS[prefix]
    rate = float(number) * factor / (1 if binary or unit == "B" else 8)
    if not _SLOWEST <= rate <= _FASTEST:
        raise SettingsError(
            f"--bandwidth {text[:32]!r} is {rate:g} bytes per second: give one from "
            f"{_SLOWEST:g}B/s to {_FASTEST / 1e12:g}TB/s"
        )
    return Bandwidth(text=text.strip(), bytes_per_second=rate)


def early_cases(
    question: EarlyQuestion, prefill: Engine, decode: Engine, planned: Estimate
) -> list[EarlyCase]:
    """Return how long until decode has the cache, for each bandwidth and prompt."""
    estimates = {planned.tokens: planned}
    for prompt in question.prompts:
        try:
            estimates[prompt] = estimates.get(prompt) or estimate_reads(prefill, decode, prompt)
        except EngineError as exc:
            raise EngineError(f"--prompt {prompt}: {exc}") from exc
    return [
        _case(question, bandwidth, estimates[prompt])
        for bandwidth in question.bandwidths
        for prompt in question.prompts or (planned.tokens,)
    ]


def _case(question: EarlyQuestion, bandwidth: Bandwidth, estimate: Estimate) -> EarlyCase:
    prompt, chunk, rate = estimate.tokens, question.chunk, bandwidth.bytes_per_second
    total, early = estimate.sizes.nbytes, estimate.early_bytes
    chunks = -(-prompt // chunk)
    computing, moving = prompt / question.prefill_rate, total / rate
    # Moving is busy from some chunk on until the end, so the end is the largest, over the chunks,
    # of the time when a chunk is computed plus the time that it and all later ones take to be
    # moved. Both are linear in the chunk's index, but for a shorter last chunk, so only the first
    # and the last two chunks can give the largest.
    end = max(
        min(index * chunk, prompt) / question.prefill_rate
        + (prompt - (index - 1) * chunk) * early / prompt / rate
        for index in (1, max(1, chunks - 1), chunks)
    )
    return EarlyCase(
        bandwidth=bandwidth,
        prompt=prompt,
        chunks=chunks,
        early_bytes=early,
        late_bytes=total - early,
        prefill_seconds=computing,
        move_seconds=moving,
        sequential_seconds=computing + question.hop_seconds + moving,
        early_seconds=end + (total - early) / rate,
    )
