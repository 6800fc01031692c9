"""Decide whether two engines may exchange pages, from what their ranks publish."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.core.errors import HandshakeError, IncompatibleError, WireError
from kvferry.core.lifecycle.holds import Incarnation
from kvferry.core.messages import RankPayload, decode_payload, decode_versions
from kvferry.core.side_channel_messages import MAX_RANKS, SPOKEN, Versions
from kvferry.core.work_budget import FACT_STEPS, PAYLOAD_BYTES_PER_STEP, WorkBudget

UPGRADE = "upgrade the older of the two engines"
MAX_ENGINE_FIELDS = 1 << 14
"""The most fields of all ranks (64 of 80 layers: 10,240); freeing them blocks threads for 10 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine publishes, decoded and checked; an empty ``ticket_key`` means no proofs."""

    engine: str
    incarnation: Incarnation
    ranks: tuple[RankPayload, ...]
    ticket_key: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgements:
    """Which differences in ``RankPayload.agreement`` an operator may allow; others are refused."""

    keys: frozenset[str] = frozenset()  # those that can differ without corrupting data
    overridden: bool = False  # whether differences in ``keys`` are only reported
    told: frozenset[str] = frozenset()  # may always differ, as software does; refusals name them


def engine_info(
    payloads: Sequence[bytes], ticket_key: bytes = b"", *, engine: str = ""
) -> EngineInfo:
    """Decode and check the payloads of an engine's ranks, which are untrusted as the ticket key is.

    Raises:
        IncompatibleError: a rank speaks no protocol version of this build.
        HandshakeError: a payload cannot be decoded, payloads contradict each other, checking them
            takes too much work, or they are of another engine than the one that was asked
            (``engine``).
    """
    if not 1 <= len(payloads) <= MAX_RANKS:
        raise HandshakeError(f"payloads of {len(payloads)} ranks; 1 to {MAX_RANKS} are allowed")
    budget = WorkBudget(HandshakeError, "reading what the engine publishes")
    ranks, fields = [], 0
    for rank, data in enumerate(payloads):
        ranks.append(_decode(rank, data, budget))
        fields += len(ranks[-1].layout.fields)
        if fields > MAX_ENGINE_FIELDS:
            raise HandshakeError(
                f"ranks 0 to {rank} have {fields} fields; {MAX_ENGINE_FIELDS} are allowed for all "
                "ranks of an engine: describe memory with fewer fields, or use fewer ranks"
            )
    for problem in _problems(ranks):
        raise HandshakeError(f"{problem}; every rank of an engine must be started alike")
    first = ranks[0]
    if engine and first.engine != engine:
        raise HandshakeError(f"it answered with the ranks of engine {first.engine!r}")
    return EngineInfo(
        engine=first.engine,
        incarnation=Incarnation(first.incarnation),
        ranks=tuple(ranks),
        ticket_key=ticket_key,
    )


def agree(
    mine: RankPayload,
    theirs: RankPayload,
    judgements: Judgements = Judgements(),
) -> tuple[str, ...]:
    """Raise ``IncompatibleError`` if a rank must not read from a rank of another engine.

    Both must have a protocol version in common, the same driver, and equal values for every key of
    ``RankPayload.agreement`` that *both* have. The error names each difference with both values;
    those that the operator allows are returned, as texts.
    """
    version = mine.common(theirs)
    clashes = [(name, _side_by_side(name, *values)) for name, *values in _clashes(mine, theirs)]
    judged = [text for name, text in clashes if name in judgements.keys]
    facts = [text for name, text in clashes if name not in judgements.keys | judgements.told]
    if mine.driver != theirs.driver:
        facts.insert(0, _side_by_side("driver", mine.driver, theirs.driver))
    if version is None:
        facts.insert(0, _side_by_side("protocol versions", mine.spoken, theirs.spoken))
    if version is None or facts or (judged and not judgements.overridden):
        refused = facts if judgements.overridden else facts + judged
        remedy = ""
        if version is None:
            remedy = f", and {UPGRADE}"
        elif not facts:
            remedy = (
                ", or, if you know that their pages mean the same, set enforce_handshake_compat to "
                "false on the engine that reads"
            )
        raise IncompatibleError(
            f"engine {mine.engine!r} (rank {mine.rank}) must not read from engine "
            f"{theirs.engine!r} (rank {theirs.rank}). They differ in {'; '.join(refused)}. "
            f"Start both alike{remedy}{differing_software(mine, theirs, judgements)}"
        )
    return tuple(judged)


def differing_software(mine: RankPayload, theirs: RankPayload, judgements: Judgements) -> str:
    """Return text for an error: the values in ``judgements.told`` that differ; empty if none."""
    told = [
        _side_by_side(name, *values)
        for name, *values in _clashes(mine, theirs)
        if name in judgements.told
    ]
    return f" ({'; '.join(told)})" if told else ""


def unspoken(theirs: Versions) -> str:
    """Return the error text for a peer that speaks no protocol version of this build."""
    return f"it speaks protocol versions {theirs.spoken}, this build {SPOKEN.spoken}: {UPGRADE}"


def _decode(rank: int, data: bytes, budget: WorkBudget) -> RankPayload:
    """Decode the untrusted payload of one rank, at the expense of the budget."""
    budget.spend(len(data) // PAYLOAD_BYTES_PER_STEP, f"the payload of rank {rank}")
    try:
        # First, since the form of a payload whose versions are unknown is unknown, too.
        versions = decode_versions(data)
        if versions.common(SPOKEN) is None:
            raise IncompatibleError(f"payload of rank {rank}: {unspoken(versions)}")
        payload = decode_payload(data)
    except WireError as exc:
        raise HandshakeError(f"payload of rank {rank}: {exc}") from exc
    steps = payload.layout.steps + FACT_STEPS * len(payload.agreement)
    budget.spend(steps, f"the payload of rank {rank}")
    return payload


def _problems(ranks: Sequence[RankPayload]) -> Iterator[str]:
    first = ranks[0]
    seen: dict[object, int] = {}
    addresses: dict[bytes, int] = {}
    for index, payload in enumerate(ranks):
        if payload.rank != index:
            yield f"payload {index} of {len(ranks)} is that of rank {payload.rank}"
        for name in ("engine", "incarnation", "driver"):
            value, other = getattr(first, name), getattr(payload, name)
            if value != other:
                yield f"rank 0 says {name} {value!r}, rank {index} {other!r}"
        groups = len(first.layout.groups), len(payload.layout.groups)
        if groups[0] != groups[1]:
            yield f"rank 0 has {groups[0]} groups, rank {index} {groups[1]}"
        for name, value, other in _clashes(first, payload):
            yield f"rank 0 says {name} {_short(value)}, rank {index} {_short(other)}"
        twin = seen.setdefault(payload.coordinates, index)
        if twin != index:
            yield f"ranks {twin} and {index} both stand at {payload.coordinates}"
        twin = addresses.setdefault(payload.address, index)
        # A reader would have one connection for both ranks: it would close the connection twice,
        # and read the memory of one rank where it means the other.
        if twin != index:
            yield f"ranks {twin} and {index} publish one transport address"


def _clashes(mine: RankPayload, theirs: RankPayload) -> Iterator[tuple[str, str, str]]:
    # Keys that only one of them has are ignored: a newer version may publish more.
    for name in sorted(mine.agreement.keys() & theirs.agreement.keys()):
        value, other = mine.agreement[name], theirs.agreement[name]
        if value != other:
            yield name, value, other


def _side_by_side(name: str, mine: str, theirs: str) -> str:
    return f"{name}: {_short(mine)} here, {_short(theirs)} there"


_bounded = reprlib.Repr()
_bounded.maxstring = 200


def _short(value: str) -> str:
    """Return an untrusted value quoted, and cut to a length that people can read."""
    return _bounded.repr(value)
